"""Checks and log lines while a run waits for its processes; without them it would wait forever for a stopped or stuck
process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trinity_core.config import Config
from trinity_core.runtime.faults import ANOTHER_FOLLOWS, ProcessLost, first_error_stays, is_transient
from trinity_core.store.run_store import open_run_store, present
from trinity_core.store.schema import EXPLORER
from trinity_core.waits import Wait

log = logging.getLogger(__name__)

ASK_SECONDS = 30.0
SILENCE_SECONDS = 600.0
"""Time limit for an answer. A busy process may run no Python code for minutes, for example while it writes a large
checkpoint."""


def within(seconds: float, lacking: str, check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` with a time limit: `seconds` from now on it raises ProcessLost, naming what is `lacking`."""
    deadline = time.monotonic() + seconds

    def timed() -> None:
        check()
        if time.monotonic() > deadline:
            raise ProcessLost(f"{lacking} within {seconds:.0f} s.")

    return timed


def answering(actors: Mapping[str, Any], check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` that also asks actors (by name) for their `progress`; they keep a thread free for it.

    It raises ProcessLost for an actor that does not answer. A dead actor is reported by the waiting call itself.
    """
    asked: dict[str, tuple[Any, float]] = {}

    def check_and_ask() -> None:
        import ray

        check()
        now = time.monotonic()
        for name, actor in actors.items():
            answer, asked_at = asked.get(name, (None, -ASK_SECONDS))
            if answer is None or (now - asked_at >= ASK_SECONDS and ray.wait([answer], timeout=0)[0]):
                asked[name] = actor.progress.remote(), now
            elif now - asked_at >= SILENCE_SECONDS:
                raise ProcessLost(f"{name} has not answered for {now - asked_at:.0f} s.")

    return check_and_ask


def starting(what: str, unplaced: Callable[[], Sequence[str]], check: Callable[[], None]) -> Callable[[], None]:
    """Return `check` that also logs what the start of `what` still lacks; `unplaced` names actors without an answer."""
    wait = Wait(f"{what} to start")

    def check_and_tell() -> None:
        check()
        late = ", ".join(unplaced())
        wait.note(f"still to answer: {late}" if late else "they are loading")

    return check_and_tell


def explorer_starts(config: Config) -> AbstractContextManager[None]:
    def note() -> None:
        with open_run_store(config) as store:
            store.mark_seen(EXPLORER, config.explorer.name)

    return present(note, f"explorer {config.explorer.name}")


def withdraw(config: Config, error: BaseException | None, components: set[str]) -> None:
    """Record after a failure that this run's explorer need not be waited for, unless another attempt follows.

    The same applies to the trainer if it is among the run's `components`. Does nothing without an explorer.
    """
    if error is None or "explore" not in components:
        return
    if isinstance(error, Exception) and is_transient(error) and ANOTHER_FOLLOWS.get()():
        return
    with first_error_stays(succeeded=False), open_run_store(config) as store:
        store.leave(config.explorer.name)
        if "train" in components:
            store.expect_trainer(False)
        log.info("explorer %s has left the run", config.explorer.name)
