"""The progress of a run, one line a step for people: in the log of the actor, at the terminal and in Prefect."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from trinity_core.base.timing import duration
from trinity_core.base.waits import Reminder
from trinity_core.config import Config
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsFile, MetricsReader, stream_of
from trinity_core.exchange.tracking.scores import (
    by_eval_set,
    intervals_like_the_newest,
    score_text,
    scores_like_the_newest,
    step_scores_text,
)

log = logging.getLogger(__name__)

SPEED = ("tokens_per_second", "timing_s/step")
"""Metrics at the end of each line of progress, if present."""
RECENT_STEPS = 20
"""Steps whose median time gives the pace."""
ASK_SECONDS = 2.0
"""Interval of requests to an actor about what it waits for."""


def seconds_a_step(times: Sequence[float]) -> float | None:
    """Return the median time between the latest steps, given when each was recorded; None before the second one."""
    gaps = [after - before for before, after in pairwise(times[-RECENT_STEPS:])]
    return median(gaps) if gaps else None


def steps_text(step: int, total: int | None, seconds: float | None) -> str:
    """Return `12 of 140, 3 min 20 s left`: `total` unless it is exceeded, and the `seconds` left; each if known."""
    left = f", {duration(seconds)} left" if seconds and seconds >= 1 else ""
    return f"{step}{f' of {total}' if total and step <= total else ''}{left}"


class StepLines:
    """Reads a run's new metrics and describes the steps of one source."""

    def __init__(self, job_dir: Path, source: str) -> None:
        """Lines that are there already, an earlier attempt's, are not new."""
        self.last: MetricLine | None = None
        """The newest step of the source."""
        self._source = source
        self._reader = MetricsReader(job_dir, self._forget)
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        """When the latest steps of this attempt were recorded, in Unix seconds."""
        self._seen = -1
        """Position of the last line seen; a rewind lets the reader start over."""
        for _ in self.new():
            pass
        self._times.clear()

    def new(self) -> Iterator[MetricLine]:
        """Yield new steps of the source and evaluations, in the order they were written. While a step is yielded,
        `text` describes it."""
        for line in self._reader.read():
            is_own = line.source == self._source
            if is_own:
                self.last = line
                self._times.append(line.time)
            if self._reader.start > self._seen:
                self._seen = self._reader.start
                if is_own or stream_of(line.source) == "eval":
                    yield line

    def text(self, total: int | None) -> str:
        """Return the line of progress of the last step, of `total` if known: `step 12 of 140, 3 min 20 s left:
        reward/mean 0.61, score 0.580 [0.541, 0.618] at step 10, tokens_per_second 5753`. An explorer's has the length
        of its answers; the score and the loss are in the trainer's."""
        numbers = self.last.metrics if self.last else {}
        is_trainer = self._source == "trainer"
        own = _shown(numbers, ["actor/final_loss" if is_trainer else "response_length/mean"])
        parts = [*_shown(numbers, ["reward/mean"]), *(self._score() if is_trainer else ()), *own]
        parts += _shown(numbers, SPEED)
        return f"{self.step_text(total)}: {', '.join(parts)}"

    def step_text(self, total: int | None) -> str:
        """Return `step 12 of 140, 3 min 20 s left`, as far as known."""
        if self.last is None:
            return "no step yet"
        return f"step {steps_text(self.last.step, total, self.seconds_left(total))}"

    def seconds_left(self, total: int | None) -> float | None:
        """Return the time for the rest of `total` steps at the pace of the latest ones, if known."""
        pace = seconds_a_step([*self._times])
        return None if self.last is None or not total or pace is None else max(total - self.last.step, 0) * pace

    def _score(self) -> Iterator[str]:
        """Yield the newest score with its step, if there is one."""
        if scores := scores_like_the_newest(self._reader.evaluations):
            step = max(scores)
            interval = intervals_like_the_newest(self._reader.evaluations).get(step)
            yield f"score {score_text(scores[step], interval)} at step {step}"

    def _forget(self) -> None:
        self.last = None
        self._times.clear()


def _shown(metrics: Mapping[str, float], names: Sequence[str]) -> Iterator[str]:
    shown = {name: metrics[name] for name in names if name in metrics}
    return (f"{name} {value:.0f}" if value >= 1000 else f"{name} {value:.4g}" for name, value in shown.items())


class LoggedMetrics(MetricsFile):
    """Writes the metrics of an actor's steps, and logs the line of progress of each."""

    def __init__(self, job_dir: Path, source: str) -> None:
        super().__init__(job_dir, source)
        self._lines = StepLines(job_dir, source)

    def write(
        self, step: int, metrics: Mapping[str, float], made_with: str = "", total_steps: int | None = None,
        weights: str = "", updates: int | None = None,
    ) -> None:  # fmt: skip
        super().write(step, metrics, made_with, total_steps, weights, updates)
        for line in self._lines.new():
            if line.source == self.source:
                log.info("%s: %s", self.source, self._lines.text(total_steps))


class ProgressReport:
    """Logs each step of one source of metrics as it is recorded, and what its actor waits for, if the wait is long.
    An explorer's report also logs the scores, in order with its steps."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source
        self.total_steps: int | None = None
        self.actor: ActorWaits | None = None
        self.lines = StepLines(config.job_dir, source)
        # Those of an evaluation beside training are logged where it runs.
        self._tells_scores = source.startswith("explorer") and not config.evaluates_beside

    def report(self) -> None:
        """Log what is new."""
        for line in self.lines.new():
            if line.source == self.source:
                self.tell(self.lines.text(self.total_steps))
                if self.actor is not None:
                    self.actor.begin()
            elif self._tells_scores:
                log.info("%s", step_scores_text(self.config, line.step, by_eval_set(self.config, line.metrics)))
        if self.actor is not None and (waits := self.actor.news()):
            self.tell(f"{self.lines.step_text(self.total_steps)}; {waits}")

    def tell(self, text: str) -> None:
        log.info("%s: %s", self.source, text)

    def finish(self) -> None:
        """Report the rest of a run that has returned, finished or stopped."""
        self.actor = None
        self.report()

    def close(self) -> None:
        """Remove what is shown only while the actor runs."""


class ActorWaits:
    """What an actor waits for or evaluates: requested every few seconds, without blocking."""

    def __init__(self, ask: Callable[[], Future[dict[str, Any]]]) -> None:
        self._ask = ask
        self._answer: Future[dict[str, Any]] | None = None
        self._next = 0.0
        self.begin()

    def begin(self) -> None:
        """Count waits from now on: what the actor waited for has come."""
        self._since: float | None = None
        self._reminder = Reminder()

    def news(self) -> str:
        """Return the wait, if it is time to report it (again); "" otherwise."""
        now = time.monotonic()
        if self._answer is None:
            if now >= self._next:
                self._answer, self._next = self._ask(), now + ASK_SECONDS
            return ""
        if not self._answer.done():
            return ""
        # An actor that has ended is reported by the code that waits for its run.
        waits: str = "" if self._answer.exception() else self._answer.result()["waits"]
        self._answer = None
        if not waits:
            self.begin()
            return ""
        self._since = now if self._since is None else self._since
        return waits if self._reminder.due(now - self._since) else ""
