"""The progress of a run in the log: new metrics and scores, and what an actor waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any

from trinity_core.base.waits import Reminder
from trinity_core.config import Config
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsReader, progress_text, stream_of
from trinity_core.exchange.tracking.scores import by_eval_set, step_scores_text

log = logging.getLogger(__name__)

REPORT_SECONDS, MAX_REPORT_SECONDS = 10.0, 60.0
"""Minimum and maximum time between two reports."""
REPORT_SHARE = 0.01
"""Maximum share of time for reports: Prefect's cost up to a second, on cores that engines and trainer need."""
ASK_SECONDS = 2.0
"""Interval of requests to an actor about what it waits for."""


class ProgressReport:
    """Logs the progress of one source of metrics, as often as `REPORT_SHARE` allows and only after a change. It also
    logs what its actor waits for, if the wait is long, and an explorer's scores as soon as they are there."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source
        self.total_steps: int | None = None
        self.actor: ActorWaits | None = None
        self._step = -1
        self._metrics = MetricsReader(config.job_dir, self._forget)
        self._last: MetricLine | None = None
        self._reading = Lock()
        """Serialises reading, because the last report may overlap with the previous one."""
        self._told: list[MetricLine] = []
        """Evaluations whose scores have been logged, or were there before."""
        self._read()
        self._due = 0.0

    def report_if_due(self) -> None:
        self._tell_scores(self._read())
        if self.actor is not None and (waits := self.actor.news()):
            self.tell(f"{self._text(self._last)}; {waits}", self._percent(self._last))
        began = time.monotonic()
        if began >= self._due:
            self.report()
            self._due = time.monotonic() + pause_after(time.monotonic() - began)

    def report(self, done: bool = False) -> None:
        """Report now if there are unreported steps, or if `done`: the last report, whether stopped or not."""
        self._tell_scores(self._read())
        last = self._last
        if last is None or (last.step == self._step and not done):
            return
        self._step = last.step
        percent = 100.0 if done and self.total_steps is None else self._percent(last)
        self.show(self._text(last), percent)

    def show(self, text: str, percent: float) -> None:
        """Show one report, with all attachments."""
        self.tell(text, percent)

    def tell(self, text: str, percent: float) -> None:
        log.info("%s: %s", self.source, text)

    def _read(self) -> list[MetricLine]:
        """Read what has been written since, and return the evaluations among it that are not logged yet."""
        with self._reading:
            lines = list(self._metrics.read())
            self._last = next((line for line in reversed(lines) if line.source == self.source), self._last)
            evaluations = [line for line in lines if stream_of(line.source) == "eval"]
            new = [line for line in evaluations if line not in self._told]
            if evaluations:
                self._told = [*self._metrics.evaluations]
            return new

    def _text(self, last: MetricLine | None) -> str:
        return "no step yet" if last is None else progress_text(last.step, last.metrics, self.total_steps)

    def _forget(self) -> None:
        self._last = None

    def _tell_scores(self, evaluations: list[MetricLine]) -> None:
        """Log scores in an explorer's report. Those of an evaluation beside training are logged where it runs."""
        if self.source.startswith("explorer") and not self.config.evaluates_beside:
            for line in evaluations:
                log.info("%s", step_scores_text(self.config, line.step, by_eval_set(self.config, line.metrics)))

    def _percent(self, last: MetricLine | None) -> float:
        step = last.step if last else 0
        return min(100.0 * step / self.total_steps, 100.0) if self.total_steps else 0.0


class ActorWaits:
    """What an actor waits for or evaluates: requested every few seconds, without blocking."""

    def __init__(self, ask: Callable[[], Future[dict[str, Any]]]) -> None:
        self._ask = ask
        self._answer: Future[dict[str, Any]] | None = None
        self._next = 0.0
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
            self._since, self._reminder = None, Reminder()
            return ""
        self._since = now if self._since is None else self._since
        return waits if self._reminder.due(now - self._since) else ""


def pause_after(cost: float) -> float:
    """Return the seconds until the next report, after one that took `cost` seconds."""
    return min(max(cost / REPORT_SHARE, REPORT_SECONDS), MAX_REPORT_SECONDS)
