"""Waits and retries: how often to look, for how long, and what to log."""

from __future__ import annotations

import asyncio
import logging
import math
import select
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_SECONDS, MOST_SECONDS = 10.0, 60.0
"""A wait is first logged after `FIRST_SECONDS`, then at doubling intervals of at most `MOST_SECONDS`."""

QUICK_PAUSE, SLOW_PAUSE, QUICK_SECONDS = 0.005, 0.02, 2.0
"""Seconds between two looks, during the first `QUICK_SECONDS` and after them. Each look takes CPU time from others."""


def poll(seconds: float = math.inf, pause: float | None = None) -> Iterator[float]:
    """Yield the seconds waited so far, with a `pause` between two looks, until they exceed `seconds`.

    Code after the loop handles the time-out.
    """
    began = time.monotonic()
    while True:
        yield time.monotonic() - began
        if (rest := _rest(time.monotonic() - began, seconds, pause)) is None:
            return
        time.sleep(rest)


async def poll_async(seconds: float = math.inf, pause: float | None = None) -> AsyncIterator[float]:
    began = time.monotonic()
    while True:
        yield time.monotonic() - began
        if (rest := _rest(time.monotonic() - began, seconds, pause)) is None:
            return
        await asyncio.sleep(rest)


def _rest(elapsed: float, seconds: float, pause: float | None) -> float | None:
    """Return the seconds until the next look; None after the limit."""
    if elapsed > seconds:
        return None
    return pause or (QUICK_PAUSE if elapsed < QUICK_SECONDS else SLOW_PAUSE)


def retry(
    work: Callable[[], T], is_transient: Callable[[Exception], bool], seconds: float, pause: float, notice: str = ""
) -> T:
    """Call `work`, repeatedly after transient errors for at most `seconds`, and return its result or raise the last
    error.

    `work` must be repeatable. `notice`, the reason for waiting, is logged once.
    """
    waited = False
    for elapsed in poll(pause=pause):
        try:
            result = work()
        except Exception as error:
            if not is_transient(error) or elapsed > seconds:
                raise
            if notice and not waited:
                log.warning("%s; waits for it, at most %g minutes (%s)", notice, seconds / 60, error)
            waited = True
        else:
            if notice and waited:
                log.info("no longer: %s", notice)
            return result
    raise AssertionError("unreachable: a poll without a limit does not end")


class Reminder:
    """Decides when to log a long wait: after 10 s, 20 s, 40 s, and then every minute. Reads no clock."""

    def __init__(self) -> None:
        self._next = self._pause = FIRST_SECONDS

    def due(self, elapsed: float) -> bool:
        """True if it is time to log, `elapsed` seconds after the start; then False until the next time."""
        if elapsed < self._next:
            return False
        self._next = elapsed + self._pause
        self._pause = min(2 * self._pause, MOST_SECONDS)
        return True


class Wait:
    """A wait that starts when the object is created."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._reminder = Reminder()
        self.text = ""
        """Description of the wait; empty until the first note."""

    def note(self, details: str) -> str:
        """Update and return the description, `waits for version 3, 40 s so far; <details>`, and log it if due."""
        seconds = time.monotonic() - self._began
        self.text = f"waits for {self._what}, {seconds:.0f} s so far; {details}"
        if self._reminder.due(seconds):
            log.info(self.text)
        return self.text


def is_readable(descriptor: int, seconds: float | None) -> bool:
    """True if `descriptor` has data or is at EOF within `seconds`; `None` sets no limit."""
    waiting = select.poll()  # `select.select` cannot handle descriptors from 1,024 on
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else math.ceil(seconds * 1000)))
