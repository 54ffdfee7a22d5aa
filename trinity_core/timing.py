"""Timers: time per part of a step, and time during which any activity of a kind is in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType


class BusyTimer:
    """Adds up the time during which at least one of its `with` blocks is open, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._total = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._total += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Total so far, including open blocks."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._open else 0.0)


UNCOUNTED: ContextVar[BusyTimer] = ContextVar("UNCOUNTED")
"""Time that the attempt running here spends waiting for shared resources; it does not count against its limit."""


def uncounted() -> BusyTimer:
    """Return the timer to open while this workflow waits for shared resources; outside an attempt an unused one."""
    return UNCOUNTED.get(None) or BusyTimer()


@dataclass
class StepTimer:
    """Seconds by part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `timing_s/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
