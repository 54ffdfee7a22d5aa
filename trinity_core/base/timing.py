"""Timers: time per part of a step, and time during which any activity of a kind is in progress. Durations as text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType


class BusyTimer:
    """Adds up the time during which at least one of its `with` blocks is open, in any thread. Ends the resources that
    its work still holds when the work is given up."""

    is_over: bool
    """True once the measured work is given up: nobody waits for it any longer."""

    def __init__(self) -> None:
        self.is_over = False
        self._held: list[Callable[[], object]] = []
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

    def hold(self, end: Callable[[], object]) -> None:
        """Register `end`, which is called in its own thread when the work is given up, or now if it already is. The
        work's blocked event loop may never release the resource itself."""
        with self._lock:
            self._held.append(end)
            is_over = self.is_over
        if is_over:
            self.give_up()

    def let_go(self, end: Callable[[], object]) -> None:
        """Unregister `end`: the work has released the resource itself."""
        with self._lock:
            if end in self._held:
                self._held.remove(end)

    def give_up(self) -> None:
        """Mark the work as given up, and end the resources it still holds."""
        with self._lock:
            self.is_over = True
            held, self._held = self._held, []
        for end in held:
            threading.Thread(target=end, name="given-up", daemon=True).start()

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
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add to `timing_s/<name>`."""
        key = f"timing_s/{name}"
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


def duration(seconds: float) -> str:
    """Format seconds: `42 s`, `3 min 20 s`, `5 h 07 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
