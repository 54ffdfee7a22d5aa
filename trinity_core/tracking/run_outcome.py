"""How a run ended, as tracking systems record it."""

from __future__ import annotations

from enum import Enum


class RunOutcome(Enum):
    """The end of a run or of one attempt of it."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By a person or by SIGTERM; it may be resumed."""

    @classmethod
    def of(cls, error: BaseException | None) -> RunOutcome:
        """From what ended the run: cancellation is an exception that is no `Exception`, as with Ctrl+C."""
        if error is None:
            return cls.FINISHED
        return cls.FAILED if isinstance(error, Exception) else cls.CANCELLED
