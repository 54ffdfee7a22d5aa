"""Whether processes that work for long still answer: one that is stopped, or stuck, would be waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trinity_core.runtime.faults import AGAIN, ProcessLost

ASK_SECONDS = 30.0
"""Between two questions."""
SILENCE_SECONDS = 600.0
"""For an answer: a busy process may not run Python code for minutes, as while it writes a large checkpoint."""


def within(seconds: float, lacking: str, check: Callable[[], None]) -> Callable[[], None]:
    """`check`, which from now on has this time: then it raises `ProcessLost`, which says what is `lacking`."""
    deadline = time.monotonic() + seconds

    def timed() -> None:
        check()
        if time.monotonic() > deadline:
            raise ProcessLost(f"{lacking} within {seconds:.0f} s. {AGAIN}")

    return timed


class Pulse:
    """Asks actors (by name) for their `progress`, for which their long work leaves a thread free.

    `check` raises what keeps the whole run from its end.
    """

    def __init__(self, actors: Mapping[str, Any], check: Callable[[], None]) -> None:
        self._actors = actors
        self._check = check
        self._asked: dict[str, tuple[Any, float]] = {}

    def check(self) -> None:
        """To be called while waiting. Raises `ProcessLost` for a silent actor; whoever waits hears of a dead one."""
        import ray

        self._check()
        now = time.monotonic()
        for name, actor in self._actors.items():
            answer, asked_at = self._asked.get(name, (None, -ASK_SECONDS))
            if answer is None or (now - asked_at >= ASK_SECONDS and ray.wait([answer], timeout=0)[0]):
                self._asked[name] = actor.progress.remote(), now
            elif now - asked_at >= SILENCE_SECONDS:
                raise ProcessLost(f"{name} has not answered for {now - asked_at:.0f} s. {AGAIN}")
