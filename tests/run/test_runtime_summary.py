"""`summary.json`: whole or not there, so that a stage which a kill or a full disk cut short is not taken as done."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from example_helpers import experiences

from trinity_core.base.files import write_json
from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.rollouts import rollouts_dir
from trinity_core.exchange.tracking.run_record import record_path, record_start
from trinity_core.exchange.tracking.scores import evaluation_text, score_fingerprint
from trinity_core.run.attempt import PLAIN
from trinity_core.run.stop import StopRules
from trinity_core.run.summary import (
    publish,
    read_summary,
    summarise,
    summary_of_scores,
    summary_path,
    summary_text,
    write_summary,
)

TASKS = {"explorer_input": {"taskset": {"path": "tasks.jsonl"}, "eval_tasksets": [{"path": "tasks.jsonl"}]}}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = {"model_path": "m", "max_model_len": 8}
    return config_from_dict({"model": model, "mode": "bench", "buffer": TASKS, "checkpoint_root_dir": str(tmp_path)})


def attempt_at(config: Config, began: float) -> Any:
    stage, rules = SimpleNamespace(made_from={}), StopRules(config, 0, {})
    return SimpleNamespace(config=config, began=began, stage=stage, tracking_link=lambda: "", stop_rules=rules)


@pytest.mark.parametrize("left", ["", '{"step": ', "[]", "\udcff"])
def test_a_damaged_summary_is_empty(left: str, config: Config, caplog: pytest.LogCaptureFixture) -> None:
    write_summary(config, {"step": 3})
    assert read_summary(config) == {"step": 3}
    (config.job_dir / "summary.json").write_bytes(left.encode(errors="surrogateescape"))
    assert not read_summary(config)
    assert "summary.json is damaged" in caplog.text


def test_each_explorer_of_a_run_has_a_summary(config: Config) -> None:
    named = [config.with_values({"mode": "explore", "explorer.name": name}) for name in ("explorer", "explorer_new")]
    names = [summary_path(one).name for one in (config.with_values({"mode": "train"}), *named)]
    assert names == ["summary.json", "summary_explorer.json", "summary_explorer_new.json"]


@pytest.mark.parametrize(("mode", "seconds"), [("both", 65.0), ("explore", 5.0)])
def test_the_seconds_of_a_training_are_those_of_all_its_attempts(config: Config, mode: str, seconds: float) -> None:
    """The record beside a part that only explores may be its trainer's."""
    config = config.with_values({"mode": mode})
    record_path(config.job_dir).parent.mkdir(parents=True)
    write_json(record_path(config.job_dir), {"state": "failed", "began": 100.0, "ended": 140.0, "earlier": 20.0})
    record_start(config.job_dir, {}, "rft")
    attempt = attempt_at(config, time.monotonic() - 5.0)
    assert summarise(attempt, {})["seconds"] == pytest.approx(seconds, abs=4.0)


@pytest.mark.parametrize(("explored", "left"), [(4, (4, 4)), (None, (None, 0))])
def test_rows_stored_after_the_trainer_has_ended_count_in_both_lines(
    config: Config, explored: int | None, left: tuple[int | None, int]
) -> None:
    config = config.with_values({"mode": "both"})
    with open_run_store(config) as store:
        store.put("explorer", 1, {}, experiences(4), 0)
    results = {"explore": {"untrained_rows": explored}, "train": {"untrained_rows": 0}}
    summary = summarise(attempt_at(config, time.monotonic()), results)
    assert (summary["results"]["explore"]["untrained_rows"], summary["results"]["train"]["untrained_rows"]) == left


def test_the_summary_compares_the_first_rewards_with_the_last(config: Config) -> None:
    config = config.with_values({"mode": "both"})
    metrics = MetricsFile(config.job_dir, "trainer")
    attempt = attempt_at(config, time.monotonic())
    assert summarise(attempt, {})["reward"] is None  # type: ignore[arg-type]
    for step, reward in enumerate((0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), 1):
        metrics.write(step, {"reward/mean": reward})
    summary = summarise(attempt, {})  # type: ignore[arg-type]
    assert summary["reward"] == pytest.approx([0.3, 0.6]) and "0.3 → 0.6" in summary_text(summary)


def test_a_run_ends_well_although_the_doctor_cannot_read_its_records(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    config = config.with_values({"mode": "both"})
    (rollouts_dir(config.job_dir) / "eval-test_step_2.jsonl").mkdir(parents=True)
    assert publish(attempt_at(config, time.monotonic()), {}, PLAIN)["findings"] == []
    assert "the doctor could not examine the run at end: IsADirectoryError" in caplog.text


def test_the_summary_prints_what_a_finding_may_be_caused_by() -> None:
    finding = {"check": "cut-off", "evidence": "97 % of them", "cause": "a limit", "next_step": "compare"}
    summary = {"project": "p", "name": "run", "hf_dir": None, "tracking": "", "scores": {}, "step": 5}
    summary |= {"checkpoint_dir": None, "findings": [finding]}
    assert "cut-off: 97 % of them. a limit. compare" in summary_text(summary)


def test_a_bench_summary_holds_the_evaluation_of_each_set(config: Config) -> None:
    metrics = {"eval/eval/accuracy": 0.5, "eval/eval/pass@2": 0.75, "eval/seconds": 3.0}
    MetricsFile(config.job_dir, "eval").write(0, metrics, made_with=score_fingerprint(config, 0))
    summary = summary_of_scores(config)
    assert summary["score"] == 0.5
    assert summary["evaluation"] == {"eval": {"accuracy": 0.5, "pass@2": 0.75}}


def test_the_scores_of_a_pipeline_are_printed_by_stage(config: Config) -> None:
    summary = {"scores": {"before": 0.1, "sft": None, "rft": 0.98765}, "step": 5, "checkpoint_dir": None}
    text = summary_text({"project": "p", "name": "run", "hf_dir": None, "tracking": "", **summary})
    assert "base score: 0.100, rft: 0.988" in text and "None" not in text.splitlines()[2]


def test_the_evaluation_is_printed_by_eval_set() -> None:
    numbers = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "judged": 79.0, "answers": 80.0}
    repeats = {"failed_requests": 1.0, "accuracy_std": 0.02, "pass@1": 0.5, "pass@8": 0.8, "pass@4": 0.7}
    text = evaluation_text({"gsm8k": numbers | repeats, "empty": {"answers": 3.0, "judged": 0.0}})
    assert text.splitlines() == [
        "gsm8k      accuracy 0.500 [0.400, 0.600], 79 of 80 answers judged, 1 requests failed, ±0.020 between repeats, "
        "pass@4 0.700, pass@8 0.800",
        "empty      no score: 0 of 3 answers judged",
    ]
