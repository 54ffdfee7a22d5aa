"""Waits: how often they look, and what they say: at any time to whoever asks, and now and then in the log."""

from __future__ import annotations

import logging
import math
import select
import time

log = logging.getLogger(__name__)

FIRST_SECONDS, MOST_SECONDS = 10.0, 60.0
"""The first word of a wait comes after so long, the next ones after twice as long each, but at least once a minute."""

QUICK_PAUSE, SLOW_PAUSE, QUICK_SECONDS = 0.005, 0.02, 2.0
"""Seconds between two looks in the first `QUICK_SECONDS`, and then: each look takes time of cores that others use."""


class Pauses:
    """The pauses between the looks of a wait that begins now."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def sleep(self) -> None:
        """Until the next look."""
        time.sleep(QUICK_PAUSE if time.monotonic() - self._began < QUICK_SECONDS else SLOW_PAUSE)


class Reminder:
    """When to speak of something that lasts: after 10 s, 20 s, 40 s, and then every minute. Without a clock."""

    def __init__(self) -> None:
        self._next = self._pause = FIRST_SECONDS

    def due(self, elapsed: float) -> bool:
        """True if it is time to speak, `elapsed` seconds after the beginning; then not again before the next time."""
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
    """Whether something can be read, or its end has come, within a time; `None` sets no limit."""
    waiting = select.poll()  # `select.select` refuses descriptors from 1,024 on
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else math.ceil(seconds * 1000)))
