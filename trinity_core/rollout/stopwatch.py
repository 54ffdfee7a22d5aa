"""Where the time of a step goes, when many things happen at once."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """Adds up the time in which at least one `with` block of it was open. For one thread."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._total = 0.0

    def __enter__(self) -> None:
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open -= 1
        if not self._open:
            self._total += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """The sum so far, blocks still open included."""
        return self._total + (time.perf_counter() - self._since if self._open else 0.0)
