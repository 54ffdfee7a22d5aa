"""Timers: the time each part of a step takes, and the time anything of a kind is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType


class BusyTimer:
    """Adds up the time in which at least one `with` block of it was open, of any thread. Ends what its work has left
    behind if that is given up."""

    is_over: bool
    """True once what the timer measures is given up: nobody waits any longer for what its blocks wait for."""

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
        """Have `end` called, in a thread of its own, once the work is given up, or now if it is: it may never come to
        end what it holds, because its event loop is blocked."""
        with self._lock:
            self._held.append(end)
            is_over = self.is_over
        if is_over:
            self.give_up()

    def let_go(self, end: Callable[[], object]) -> None:
        """The work has ended what it held."""
        with self._lock:
            if end in self._held:
                self._held.remove(end)

    def give_up(self) -> None:
        """Nobody waits for the work any longer; what it still holds is ended."""
        with self._lock:
            self.is_over = True
            held, self._held = self._held, []
        for end in held:
            threading.Thread(target=end, name="given-up", daemon=True).start()

    @property
    def seconds(self) -> float:
        """The sum so far, blocks still open included."""
        with self._lock:
            return self._total + (time.perf_counter() - self._since if self._open else 0.0)


UNCOUNTED: ContextVar[BusyTimer] = ContextVar("UNCOUNTED")
"""Time that the workflow of the attempt that runs here does not spend, but waits for what others have."""


def uncounted() -> BusyTimer:
    """The timer to be open while this workflow waits until others give something back; one of nobody elsewhere."""
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
