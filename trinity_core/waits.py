"""Waits and retries: how often to look, for how long, and what to log meanwhile."""

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
"""A wait is logged first after `FIRST_SECONDS`, then after twice as long each time, but at least once a minute."""

QUICK_PAUSE, SLOW_PAUSE, QUICK_SECONDS = 0.005, 0.02, 2.0
"""Seconds between two looks: in the first `QUICK_SECONDS`, and then. Each look takes time of cores that others use."""


def poll(seconds: float = math.inf, pause: float | None = None) -> Iterator[float]:
    """Seconds waited so far, once per look, with a `pause` between two looks; ends when they exceed `seconds`.

    The statement after the loop names who is missing.
    """
    began = time.monotonic()
    while True:
        yield time.monotonic() - began
        if (rest := _rest(time.monotonic() - began, seconds, pause)) is None:
            return
        time.sleep(rest)


async def poll_async(seconds: float = math.inf, pause: float | None = None) -> AsyncIterator[float]:
    """`poll` for coroutines."""
    began = time.monotonic()
    while True:
        yield time.monotonic() - began
        if (rest := _rest(time.monotonic() - began, seconds, pause)) is None:
            return
        await asyncio.sleep(rest)


def _rest(elapsed: float, seconds: float, pause: float | None) -> float | None:
    """Seconds until the next look; None if there is none."""
    if elapsed > seconds:
        return None
    return pause or (QUICK_PAUSE if elapsed < QUICK_SECONDS else SLOW_PAUSE)


def retry(
    work: Callable[[], T], is_transient: Callable[[Exception], bool], seconds: float, pause: float, notice: str = ""
) -> T:
    """The result of `work`, called again after each transient error for at most `seconds`; then that error is raised.

    `work` must be repeatable. The `notice`, what is waited for, is logged once.
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
    """When to log a wait that lasts: after 10 s, 20 s, 40 s, and then every minute. Reads no clock."""

    def __init__(self) -> None:
        self._next = self._pause = FIRST_SECONDS

    def due(self, elapsed: float) -> bool:
        """True if it is time to log, `elapsed` seconds after the beginning; then False until the next time."""
        if elapsed < self._next:
            return False
        self._next = elapsed + self._pause
        self._pause = min(2 * self._pause, MOST_SECONDS)
        return True


class Wait:
    """A wait that has just begun."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._reminder = Reminder()
        self.text = ""
        """What is waited for, in words; empty until the first note."""

    def note(self, details: str) -> str:
        """Renew the text, log it if it is time to, and return it: `waits for version 3, 40 s so far; <details>`."""
        seconds = time.monotonic() - self._began
        self.text = f"waits for {self._what}, {seconds:.0f} s so far; {details}"
        if self._reminder.due(seconds):
            log.info(self.text)
        return self.text


def is_readable(descriptor: int, seconds: float | None) -> bool:
    """True if `descriptor` has data, or is at its end, within `seconds`; `None` sets no limit."""
    waiting = select.poll()  # `select.select` refuses descriptors from 1,024 on
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else math.ceil(seconds * 1000)))
