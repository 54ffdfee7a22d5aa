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
from trinity_core.exchange.tracking.progress import ActorWaits, ProgressReport, StepLines


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


class Told(ProgressReport):
    """A report that keeps what it has told."""

    def __init__(self, config: Config, source: str) -> None:
        self.texts: list[str] = []
        super().__init__(config, source)

    def tell(self, text: str) -> None:
        self.texts.append(text)


def test_a_wait_is_part_of_the_progress(actor: Actor, tmp_path: Path) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    report = Told(config, "explorer")
    report.total_steps, report.actor = 4, ActorWaits(actor.ask)
    report.report()
    actor.answer("waits for version 0 of the trainer")
    report.report()
    MetricsFile(config.job_dir, "explorer").write(1, {"reward/mean": 0.5})
    report.report()
    actor.answer("waits for version 1 of the trainer")
    report.report()
    report.finish()
    assert report.texts == [
        "no step yet; waits for version 0 of the trainer",
        "step 1 of 4: reward/mean 0.5",
        "step 1 of 4; waits for version 1 of the trainer",
    ]


@pytest.mark.parametrize("steps", [True, False])
def test_only_a_wait_within_one_step_is_told(steps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that is asked every few seconds may be about to wait a moment each time."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    config, actor = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path)), Actor()
    report = Told(config, "explorer")
    report.actor = ActorWaits(actor.ask)
    for step in range(1, 6):
        report.report()
        actor.answer("waits for version 0 of the trainer")
        report.report()
        if steps:
            MetricsFile(config.job_dir, "explorer").write(step, {"reward/mean": 0.5})
        now[0] += 4.0
    assert any("waits" in text for text in report.texts) != steps


def test_each_step_is_told_once(tmp_path: Path) -> None:
    """However many there are since the last look; those of an earlier attempt are known, also after a rewind."""
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    metrics = MetricsFile(config.job_dir, "trainer")
    metrics.write(1, {"reward/mean": 0.25})
    report = Told(config, "trainer")
    for step in range(2, 40):
        metrics.write(step, {"reward/mean": 0.5})
    for _ in range(2):
        report.report()
    metrics.write(40, {"reward/mean": 0.5})
    metrics_file.rewind(config.job_dir, 38)
    report.report()
    metrics.write(39, {"reward/mean": 0.75})
    report.finish()
    assert report.texts == [f"step {step}: reward/mean 0.5" for step in range(2, 40)] + ["step 39: reward/mean 0.75"]


def test_a_line_has_the_time_left_and_the_score_with_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in an actor's log: there the actor itself reads them."""
    now = [1000.0]
    monkeypatch.setattr(metrics_file.time, "time", lambda: now[0])
    job, numbers = tmp_path / "p" / "n", {"reward/mean": 0.5, "tokens_per_second": 57530.0}
    trainer, evaluation = MetricsFile(job, "trainer"), MetricsFile(job, "eval")
    trainer.write(1, numbers)
    now[0] += 9000.0  # until the next attempt, which is no step's time
    lines, texts, explored = StepLines(job, "trainer"), [], StepLines(job, "explorer")
    for step in (2, 3, 4, 5):
        now[0] += 30.0 if step < 5 else 300.0
        trainer.write(step, numbers)
        texts += [lines.text(10) for _ in lines.new()]
        if step == 3:
            accuracy = {"accuracy": 0.58, "accuracy_low": 0.541, "accuracy_high": 0.618, "judged": 4.0}
            evaluation.write(3, {f"eval/test/{name}": value for name, value in accuracy.items()})
            assert [line.source for line in lines.new()] == ["eval"]
    scored = "reward/mean 0.5, score 0.580 [0.541, 0.618] at step 3, tokens_per_second 57530"
    assert texts == [
        "step 2 of 10: reward/mean 0.5, tokens_per_second 57530",
        "step 3 of 10, 3 min 30 s left: reward/mean 0.5, tokens_per_second 57530",
        f"step 4 of 10, 3 min 00 s left: {scored}",
        f"step 5 of 10, 2 min 30 s left: {scored}",
    ]
    two_sets = {"eval/test/accuracy": 0.5, "eval/hard/accuracy": 0.1, "eval/hard/accuracy_low": 0.0}
    evaluation.write(6, two_sets | {"eval/hard/accuracy_high": 0.2})
    trainer.write(10, numbers)
    assert [*lines.new()] and lines.text(10).startswith("step 10 of 10: reward/mean 0.5, score 0.300 at step 6, ")
    MetricsFile(job, "explorer").write(10, numbers)
    assert [*explored.new()] and "score" not in explored.text(10), "it is in the trainer's line and in its own"
    assert lines.step_text(4) == "step 10", "of a run that is started again with fewer steps"


@pytest.fixture
def scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> tuple[Config, Callable[[int, float], None]]:
    """The configuration of an evaluation, and a function that writes an accuracy of a step into its metrics."""
    caplog.set_level("INFO", "trinity_core.exchange.tracking.progress")
    model, tasks = {"model_path": "tiny", "max_model_len": 8}, {"name": "test", "path": "x"}
    buffer = {"explorer_input": {"eval_tasksets": [tasks]}}
    tree = {"mode": "bench", "checkpoint_root_dir": str(tmp_path), "model": model, "buffer": buffer}
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


def test_each_evaluation_is_told_once(scored: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the explorer's report alone; those of an earlier attempt are known."""
    config, score = scored
    score(0, 0.25)
    reports = [ProgressReport(config, source) for source in ("explorer", "trainer")]
    score(10, 0.5)
    with mock.patch.object(metrics_file, "parse", wraps=metrics_file.parse) as parse:
        for report in reports * 2:
            report.report()
    assert parse.call_count == 2, "each reads the new line alone, once"
    assert [message.count("0.500") for message in told(caplog)] == [1]


def test_scores_are_logged_when_they_are_there(scored: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each by itself, with the run's name, and in order with the steps."""
    config, score = scored
    steps, report = MetricsFile(config.job_dir, "explorer"), ProgressReport(config, "explorer")
    for number, step in enumerate((0, 30, 40), 1):
        score(step, step / 100)
        steps.write(step + 1, {"reward/mean": 0.5})
        report.report()
        assert len(told(caplog)) == 2 * number
    assert [message.partition(":")[0].partition(",")[2] for message in told(caplog) if config.name in message] == [
        " step 0 (before training)", " step 30", " step 40"
    ]  # fmt: skip
    assert [message.startswith("explorer: step") for message in told(caplog)] == [False, True] * 3


def test_scores_of_an_evaluation_beside_training_are_logged_where_it_runs(
    scored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config, score = scored
    beside = config.with_values({"mode": "both", "explorer.eval_beside_training": True})
    report = ProgressReport(beside, "explorer")
    score(10, 0.5)
    report.report()
    assert not told(caplog)


def test_evaluations_after_a_rewind_are_told(scored: Any, caplog: pytest.LogCaptureFixture) -> None:
    config, score = scored
    report = ProgressReport(config, "explorer")
    for step in (0, 10, 20):
        score(step, 0.25)
    report.report()
    metrics_file.rewind(config.job_dir, 10)
    score(20, 0.5)
    report.report()
    assert [message.count("0.500") for message in told(caplog)] == [0, 0, 0, 1]
