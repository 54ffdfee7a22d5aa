"""How a run ends: together with those beside it in one process, and whether another attempt at it may follow."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from trinity_core.runtime.faults import Stopped


class SharedEnd:
    """Once asked, every run that was opened in its context saves and ends."""

    def __init__(self) -> None:
        self.asked = False

    def stop(self) -> None:
        """Ask all runs to save and end."""
        self.asked = True

    def check(self) -> None:
        """Nothing beside the runs themselves can go wrong here."""

    def raise_if_asked(self) -> None:
        """Raise `Stopped` in a run that has saved and ended because it was asked to."""
        if self.asked:
            raise Stopped("The run has saved and ended: a run beside it failed, or all of them were cancelled.")


def asked_to_end() -> bool:
    """Whether all runs of the present context have been asked to save and end."""
    end = SHARED_END.get()
    return end is not None and end.asked


SHARED_END: ContextVar[SharedEnd | None] = ContextVar("shared_end", default=None)
"""That of the runs which the present context opens."""

ANOTHER_FOLLOWS: ContextVar[Callable[[], bool]] = ContextVar("another_follows", default=lambda: False)
"""True if another attempt at the run of the present context follows, should this one end by a transient fault."""
