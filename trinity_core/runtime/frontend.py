"""How the driver's steps are called and shown: here as plain functions, with progress by the metrics in the log.

`tasks.frontend` calls the same steps as Prefect tasks and subflows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trinity_core.config import Config
from trinity_core.runtime.faults import POLL_SECONDS, most_telling
from trinity_core.runtime.verdicts import with_verdicts
from trinity_core.tracking.metrics_file import MetricLine, MetricsReader
from trinity_core.tracking.scores import by_eval_set, scores_text
from trinity_core.waits import Reminder

if TYPE_CHECKING:
    from trinity_core.runtime.stage import Stage, StageRequest

log = logging.getLogger(__name__)

REPORT_SECONDS, MAX_REPORT_SECONDS = 10.0, 60.0
"""Time between two reports, at least and at most."""
REPORT_SHARE = 0.01
"""Greatest share of time for reports: Prefect's cost up to a second, on cores that engines and trainer want."""
ASK_SECONDS = 2.0
"""Time between two requests to an actor for what it waits for."""
SHOWN = (
    "reward/mean", "accuracy/mean", "actor/final_loss", "actor/grad_norm", "response_length/mean",
    "tokens_per_second", "time/step", "timing_s/step",
)  # fmt: skip
"""The metrics of a line of progress, as far as they exist."""


class ProgressReport:
    """Logs the progress of one source of metrics, as often as `REPORT_SHARE` allows and only after a change; also what
    its actor waits for, if the wait is long.
    """

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source
        self.total_steps: int | None = None
        self.actor: ActorWaits | None = None
        self._step = -1
        self._metrics = MetricsReader(config.job_dir, self._forget)
        self._last: MetricLine | None = None
        """The newest one of this source."""
        self._reading = Lock()
        """The last report may not wait for the one before."""
        self._read()
        self._told = [*self._metrics.evaluations]
        """Evaluations whose scores are known."""
        self._due = 0.0

    def report_if_due(self) -> None:
        """Report if enough time has passed since the last report."""
        if self.actor is not None and (waits := self.actor.news()):
            last = self._read()
            self.tell(f"{progress_text(last, self.total_steps)}; {waits}", self._percent(last))
        began = time.monotonic()
        if began >= self._due:
            self.report()
            self._due = time.monotonic() + pause_after(time.monotonic() - began)

    def report(self, done: bool = False) -> None:
        """Report now, if there are steps that have not been reported; or `done`, the last time, stopped or not."""
        last = self._read()
        if self.source.startswith("explorer"):
            self._tell_scores(self._metrics.evaluations)
        if last is None or (last.step == self._step and not done):
            return
        self._step = last.step
        percent = 100.0 if done and self.total_steps is None else self._percent(last)
        self.show(progress_text(last, self.total_steps), percent)

    def show(self, text: str, percent: float) -> None:
        """Show one report, with all that belongs to it."""
        self.tell(text, percent)

    def tell(self, text: str, percent: float) -> None:
        """Show the text of a report."""
        log.info("%s: %s", self.source, text)

    def _read(self) -> MetricLine | None:
        with self._reading:
            for line in self._metrics.read():
                if line.source == self.source:
                    self._last = line
            return self._last

    def _forget(self) -> None:
        self._last = None

    def _tell_scores(self, evaluations: list[MetricLine]) -> None:
        """Log the scores of each evaluation since the last report."""
        for line in (line for line in evaluations if line not in self._told):
            log.info("step %d: %s", line.step, scores_text(by_eval_set(self.config, line.metrics)))
        self._told = [*evaluations]

    def _percent(self, last: MetricLine | None) -> float:
        step = last.step if last else 0
        return min(100.0 * step / self.total_steps, 100.0) if self.total_steps else 0.0


class ActorWaits:
    """What an actor waits for or evaluates: requested every few seconds, without blocking."""

    def __init__(self, ask: Callable[[], Future[dict[str, Any]]]) -> None:
        self._ask = ask
        """Asks for the actor's `progress`."""
        self._answer: Future[dict[str, Any]] | None = None
        self._next = 0.0
        self._since: float | None = None
        self._reminder = Reminder()

    def news(self) -> str:
        """The wait, if it is time to report it (again); "" otherwise."""
        now = time.monotonic()
        if self._answer is None:
            if now >= self._next:
                self._answer, self._next = self._ask(), now + ASK_SECONDS
            return ""
        if not self._answer.done():
            return ""
        # An actor that has ended is reported by whoever waits for its run.
        waits: str = "" if self._answer.exception() else self._answer.result()["waits"]
        self._answer = None
        if not waits:
            self._since, self._reminder = None, Reminder()
            return ""
        self._since = now if self._since is None else self._since
        return waits if self._reminder.due(now - self._since) else ""


def pause_after(cost: float) -> float:
    """Seconds to the next report, after one that took `cost` seconds."""
    return min(max(cost / REPORT_SHARE, REPORT_SECONDS), MAX_REPORT_SECONDS)


def progress_text(last: MetricLine | None, total: int | None) -> str:
    """`step 12 of 140: reward/mean 0.61, loss 0.02`."""
    if last is None:
        return "no step yet"
    numbers = ", ".join(f"{name} {last.metrics[name]:.4g}" for name in SHOWN if name in last.metrics)
    return f"step {last.step}{f' of {total}' if total else ''}: {numbers}"


T = TypeVar("T")


class Stoppable(Protocol):
    """A run attempt, or a token that several of them share."""

    def stop(self) -> None:
        """Ask everything to save and end."""

    def check(self) -> None:
        """Raise the error, if any, that makes waiting useless."""


class Frontend:
    """Calls each step as a plain function; shows log lines only."""

    report: type[ProgressReport] = ProgressReport

    def call(self, name: str, step: Callable[[], T], retries: bool = False) -> T:
        """The result of a step of that name. With `retries` it may be tried again, where the frontend can."""
        return step()

    def subflow(self, request: StageRequest, run: Callable[[], T]) -> T:
        """Run one stage of several; its result."""
        return run()

    def run_components(self, run: Stoppable, components: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run components concurrently: name -> result.

        When one fails, the others are asked to save and end, and the failure is raised: of several, a permanent one
        first.
        """
        with ThreadPoolExecutor(max_workers=max(len(components), 1)) as threads:
            futures = {name: threads.submit(copy_context().run, call) for name, call in components.items()}
            wait_for_all(run, futures.values(), lambda future: future.exception() is not None)
        raise_most_telling([error for future in futures.values() if (error := future.exception()) is not None])
        return {name: future.result() for name, future in futures.items()}

    def begun_by(self) -> str:
        """An id that all attempts at one run share; "" if there is only this attempt."""
        return ""

    def is_retry(self) -> bool:
        """True for a later attempt: preflight's result may be outdated."""
        return False

    def announce(self, config: Config, stage: str) -> None:
        """Show which run starts: a stage's, `pipeline` or `async`."""

    def with_human_verdicts(self, stage: Stage) -> Stage:
        """The stage with a person's verdicts as its data, if it needs them. Raises TrinityError if none were
        collected."""
        return replace(stage, config=with_verdicts(stage.config))

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        """Show the results of a run, or of a whole pipeline."""


PLAIN = Frontend()


def wait_for_all(run: Stoppable, futures: Collection[Future[Any]], has_failed: Callable[[Future[Any]], bool]) -> None:
    """Wait until all futures are done; after a failure ask the others to save and end, and wait for that.

    A cancellation (an exception in this thread, the main one) does the same, and so does a permanent tracking error.
    `has_failed` is called with futures that are done.
    """
    try:
        while not all(future.done() for future in futures):
            if any(future.done() and has_failed(future) for future in futures):
                break
            run.check()
            time.sleep(POLL_SECONDS)
    finally:
        if not all(future.done() for future in futures):
            run.stop()
            wait(futures)


def raise_most_telling(failures: Collection[BaseException]) -> None:
    """Raise a permanent failure in preference to a transient one, and `Stopped` last; nothing without failures."""
    if failures:
        raise most_telling(list(failures))
