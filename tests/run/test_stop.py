"""When a run has had enough: by its evaluations, and by its spending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import Config
from trinity_core.exchange.tracking.answers import TaskAnswers, save_answers
from trinity_core.exchange.tracking.metrics_file import MetricsFile, rewind
from trinity_core.exchange.tracking.run_record import read_record, record_path, record_start
from trinity_core.run.stop import StopRules, spent_by_stages


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.run.stop.LOOK_SECONDS", -1.0)


def rules(root: Path, gpus: int = 0, **stop: Any) -> StopRules:
    values = {"checkpoint_root_dir": str(root), "cluster.price_per_hour": 30.0}
    config = Config().with_values(values | {f"monitor.stop.{name}": value for name, value in stop.items()})
    if read_record(config.job_dir) is None:
        record_start(config.job_dir, {}, "rft")
    return StopRules(config, gpus, {})


def evaluate(job_dir: Path, step: int, accuracy: float) -> None:
    """400 tasks: the same ones are easy in each evaluation."""
    scores = (np.arange(400) < round(400 * accuracy)).astype(float)
    save_answers(job_dir, "test", step, [TaskAnswers(i, str(i), "", [score]) for i, score in enumerate(scores)])
    MetricsFile(job_dir, "eval").write(step, {"eval/test/accuracy": accuracy, "eval/test/judged": 400.0}, made_with="x")


@pytest.mark.parametrize(
    ("scores", "ends"),
    [
        ([0.4, 0.5, 0.6], False),
        ([0.6, 0.6, 0.605], True),
        ([0.6, 0.5, 0.55], True),
        ([0.6, 0.5, 0.7], False),
        ([0.6, 0.6], False),
        ([0.3, 0.6, 0.6, 0.602], True),
    ],
)
def test_patience_ends_without_a_gain_beyond_noise(tmp_path: Path, scores: list[float], ends: bool) -> None:
    stop = rules(tmp_path, patience=2)
    for i, score in enumerate(scores):
        evaluate(stop._config.job_dir, 10 * i, score)
    assert stop.has_enough() is ends
    assert ("patience" in stop.reason) is ends


def test_target(tmp_path: Path) -> None:
    stop = rules(tmp_path, target=0.9)
    evaluate(stop._config.job_dir, 1, 0.89)
    assert not stop.has_enough()
    evaluate(stop._config.job_dir, 2, 0.9)
    assert stop.has_enough() and stop.reason.startswith("monitor.stop.target")


def test_tokens_are_those_of_steps_that_count(tmp_path: Path) -> None:
    """A rewound step is sampled again."""
    stop = rules(tmp_path, tokens=250)
    job_dir = stop._config.job_dir
    for step in (1, 2):
        MetricsFile(job_dir, "explorer").write(step, {"tokens": 100.0})
    assert not stop.has_enough()
    rewind(job_dir, 1, lambda: {"explorer": 1})
    MetricsFile(job_dir, "explorer").write(2, {"tokens": 100.0})
    assert not stop.has_enough()
    MetricsFile(job_dir, "explorer_2").write(1, {"tokens": 60.0})
    assert stop.has_enough() and "260" in stop.reason


@pytest.mark.parametrize(
    ("rule", "budget", "spent"), [("hours", 2.0, 1.9), ("gpu_hours", 8.0, 1.9), ("price", 60.0, 1.9)]
)
def test_budgets_count_all_attempts(tmp_path: Path, rule: str, budget: float, spent: float) -> None:
    """Four GPUs, and 30 an hour: each budget lasts for two hours."""
    stop = rules(tmp_path, 4, **{rule: budget})
    record = record_path(stop._config.job_dir)
    began = read_record(stop._config.job_dir).began  # type: ignore[union-attr]
    for hours, ends in ((spent, False), (2.1, True)):
        write_json(record, {"state": "running", "began": began, "earlier": hours * 3600})
        assert stop.has_enough() is ends
    assert rule in stop.reason


def test_judge_calls_of_steps_and_evaluations(tmp_path: Path) -> None:
    stop = rules(tmp_path, judge_calls=100)
    job_dir = stop._config.job_dir
    MetricsFile(job_dir, "explorer").write(1, {"judge_calls": 60.0, "tokens": 500.0})
    MetricsFile(job_dir, "eval").write(1, {"eval/test/judge_calls": 30.0}, made_with="x")
    assert not stop.has_enough()
    assert (stop.spent()["judge_calls"], stop.spent()["tokens"]) == (90.0, 500.0)
    MetricsFile(job_dir, "explorer").write(2, {"judge_calls": 10.0})
    assert stop.has_enough() and stop.reason.startswith("monitor.stop.judge_calls")


def test_a_pipelines_budget_counts_all_stages(tmp_path: Path) -> None:
    config = Config().with_values({"checkpoint_root_dir": str(tmp_path), "monitor.stop.pipeline.tokens": 1000})
    pipeline_dir = config.job_dir.parent / "pipeline"
    for folder in (pipeline_dir, config.job_dir, config.job_dir.parent / "other"):
        folder.mkdir(parents=True)
    write_json(JobLayout(pipeline_dir).stages, {"sft": "other", "rft": config.name, "last": "not_run"})
    write_json(config.job_dir.parent / "other" / "summary.json", {"spent": {"tokens": 700.0, "hours": 1.5}})
    write_json(config.job_dir / "summary.json", {"spent": {"tokens": 5000.0}})  # of an earlier end of this stage
    elsewhere = spent_by_stages(pipeline_dir, config.name)
    assert elsewhere == {"tokens": 700.0, "hours": 1.5}
    stop = StopRules(config, 0, elsewhere)
    MetricsFile(config.job_dir, "explorer").write(1, {"tokens": 200.0})
    assert not stop.has_enough()
    MetricsFile(config.job_dir, "explorer").write(2, {"tokens": 100.0})
    assert stop.has_enough() and stop.reason.startswith("monitor.stop.pipeline.tokens")
