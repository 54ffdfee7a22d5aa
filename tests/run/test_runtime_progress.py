"""A run's progress also says what its actor waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.tracking import metrics_file, progress
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.progress import ActorWaits, ProgressReport


class Actor:
    """Answers once it is released."""

    def __init__(self) -> None:
        self.asked: list[Future[dict[str, Any]]] = []

    def ask(self) -> Future[dict[str, Any]]:
        self.asked.append(Future())
        return self.asked[-1]

    def answer(self, waits: str) -> None:
        self.asked[-1].set_result({"waits": waits})


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    """It may be asked at any time, and a wait is spoken of at once."""
    monkeypatch.setattr(progress, "ASK_SECONDS", 0.0)
    monkeypatch.setattr("trinity_core.base.waits.FIRST_SECONDS", 0.0)
    return Actor()


def test_nobody_waits_for_the_answer_of_an_actor(actor: Actor) -> None:
    waits = ActorWaits(actor.ask)
    assert [waits.news() for _ in range(3)] == [""] * 3 and len(actor.asked) == 1
    actor.answer("waits for version 3")
    assert waits.news() == "waits for version 3"
    assert waits.news() == "" and len(actor.asked) == 2
    actor.asked[-1].set_exception(RuntimeError("it died"))
    assert waits.news() == "", "whoever waits for its run hears of that"


def test_a_wait_is_part_of_the_progress(actor: Actor, tmp_path: Path) -> None:
    shown: list[tuple[str, float]] = []

    class Report(ProgressReport):
        def tell(self, text: str, percent: float) -> None:
            shown.append((text, percent))

    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    report = Report(config, "explorer")
    report.total_steps, report.actor = 4, ActorWaits(actor.ask)
    report.report_if_due()
    actor.answer("waits for version 0 of the trainer")
    report.report_if_due()
    MetricsFile(config.job_dir, "explorer").write(1, {"reward/mean": 0.5})
    report.report(done=True)
    assert shown == [
        ("no step yet; waits for version 0 of the trainer", 0.0),
        ("step 1 of 4: reward/mean 0.5", 25.0),
    ]


def scored(folder: Path) -> tuple[Config, Callable[[int, float], None]]:
    """The configuration of an evaluation, and a function that writes an accuracy of a step into its metrics."""
    model, tasks = {"model_path": "tiny", "max_model_len": 8}, {"name": "test", "path": "x"}
    buffer = {"explorer_input": {"eval_tasksets": [tasks]}}
    tree = {"mode": "bench", "checkpoint_root_dir": str(folder), "model": model, "buffer": buffer}
    config = config_from_dict(tree, [])
    metrics = MetricsFile(config.job_dir, "eval")

    def score(step: int, accuracy: float) -> None:
        metrics.write(step, {"eval/test/accuracy": accuracy, "eval/test/answers": 4.0, "eval/test/judged": 4.0})

    return config, score


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the reports have logged; the writer of metrics logs, too, where an earlier test has let it."""
    return [
        record.getMessage() for record in caplog.records if record.name == "trinity_core.exchange.tracking.progress"
    ]


def test_each_evaluation_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the explorer's report alone; those of an earlier attempt are known."""
    caplog.set_level("INFO", "trinity_core.exchange.tracking.progress")
    config, score = scored(tmp_path)
    score(0, 0.25)
    reports = [ProgressReport(config, source) for source in ("explorer", "trainer")]
    score(10, 0.5)
    with mock.patch.object(metrics_file, "parse", wraps=metrics_file.parse) as parse:
        for report in reports * 2:
            report.report()
    assert parse.call_count == 2, "each reads the new line alone, once"
    assert [message.count("0.500") for message in told(caplog)] == [1]


def test_scores_are_logged_when_they_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by itself, in order and with the run's name, although the next report of the steps is not due yet."""
    caplog.set_level("INFO", "trinity_core.exchange.tracking.progress")
    monkeypatch.setattr(progress, "pause_after", lambda cost: 3600.0)
    config, score = scored(tmp_path)
    report = ProgressReport(config, "explorer")
    report.report_if_due()
    for number, step in enumerate((0, 30, 40), 1):
        score(step, step / 100)
        report.report_if_due()
        assert len(told(caplog)) == number
    assert [message.partition(":")[0] for message in told(caplog)] == [
        f"{config.name}, step 0 (before training)", f"{config.name}, step 30", f"{config.name}, step 40",
    ]  # fmt: skip


def test_scores_of_an_evaluation_beside_training_are_logged_where_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trinity_core.exchange.tracking.progress")
    config, score = scored(tmp_path)
    beside = config.with_values({"mode": "both", "explorer.eval_beside_training": True})
    report = ProgressReport(beside, "explorer")
    score(10, 0.5)
    report.report()
    assert not told(caplog)


def test_evaluations_after_a_rewind_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trinity_core.exchange.tracking.progress")
    config, score = scored(tmp_path)
    report = ProgressReport(config, "explorer")
    for step in (0, 10, 20):
        score(step, 0.25)
    report.report()
    metrics_file.rewind(config.job_dir, 10)
    score(20, 0.5)
    report.report()
    assert [message.count("0.500") for message in told(caplog)] == [0, 0, 0, 1]
