"""How the driver's steps are called and shown: here as plain functions.

`tasks.frontend` calls the same steps as Prefect tasks and subflows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from trinity_core.config import Config
from trinity_core.exchange.tracking.progress import ProgressReport
from trinity_core.hosting.faults import POLL_SECONDS, most_telling
from trinity_core.run.stage import Stage, StageRequest
from trinity_core.run.verdicts import with_verdicts

T = TypeVar("T")


class Stoppable(Protocol):
    """A run attempt, or a token that several of them share."""

    def stop(self) -> None:
        """Ask everything to save and end."""

    def check(self) -> None:
        """Raise the error, if any, that makes waiting pointless."""


class Frontend:
    """Calls each step as a plain function; shows log lines only."""

    report: type[ProgressReport] = ProgressReport

    def call(self, name: str, step: Callable[[], T], retries: bool = False) -> T:
        """Run a named step and return its result. With `retries` it may be tried again, if the frontend can."""
        return step()

    def subflow(self, request: StageRequest, run: Callable[[], T]) -> T:
        return run()

    def run_components(self, run: Stoppable, components: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Run components concurrently; return name → result.

        When one fails, the others are asked to save and end. Then a failure is raised, a permanent one first.
        """
        with ThreadPoolExecutor(max_workers=max(len(components), 1)) as threads:
            futures = {name: threads.submit(copy_context().run, call) for name, call in components.items()}
            wait_for_all(run, futures.values(), lambda future: future.exception() is not None)
        raise_most_telling([error for future in futures.values() if (error := future.exception()) is not None])
        return {name: future.result() for name, future in futures.items()}

    def begun_by(self) -> str:
        """Return an id that all attempts at one run share; "" if there is only this attempt."""
        return ""

    def is_retry(self) -> bool:
        """True for a later attempt: preflight's result may be outdated."""
        return False

    def announce(self, config: Config, stage: str) -> None:
        """Announce the run that starts: a stage's, `pipeline` or `async`."""

    def with_human_verdicts(self, stage: Stage) -> Stage:
        """Return the stage with a person's verdicts as its data, if it needs them. Raises TrinityError if there are
        none."""
        return replace(stage, config=with_verdicts(stage.config))

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        """Show the results of a run, or of a whole pipeline."""


PLAIN = Frontend()


def wait_for_all(run: Stoppable, futures: Collection[Future[Any]], has_failed: Callable[[Future[Any]], bool]) -> None:
    """Wait until all futures are done; after a failure ask the others to save and end, and wait for that.

    A cancellation (an exception in this, the main thread) and a permanent tracking error have the same effect.
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
    """Raise the most telling failure: a permanent one before transient ones, Stopped last. Does nothing without
    failures."""
    if failures:
        raise most_telling(list(failures))
