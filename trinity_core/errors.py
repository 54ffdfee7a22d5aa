"""The errors a user is meant to read: one clear sentence on what is wrong, one on what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TrinityError(Exception):
    """What is wrong and what to do about it. Never retried: the same run would fail the same way.

    A message names the key, file, line or actor concerned. It survives pickling, so Ray and Prefect pass it on whole.
    """


class DataError(TrinityError):
    """A data set, a row of it or a checkpoint cannot be used as it is."""


class InputError(TrinityError, ValueError):
    """What was given to a part cannot be used: a missing or misshapen tensor, a NaN, an unknown name or argument."""


class RewardError(TrinityError):
    """A reward function gives what no reward may be, such as an accuracy of -1. No row is at fault."""


class WeightSyncError(TrinityError):
    """An engine does not hold the weights that the trainer published."""


class EndpointError(TrinityError):
    """An external endpoint refuses every request: a wrong key, an unknown model."""


class ModelError(TrinityError):
    """A model cannot be asked at all: no address, no key, no engine that starts. No question or row is at fault."""


class Unanswered(TrinityError):
    """An external endpoint did not answer one request, for good. The answer is missing, not wrong."""


class TransientFault(Exception):
    """Something outside the run's own doing broke (a dead actor, a lost node, a time-out): worth a retry."""


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything, a cancellation or SystemExit included; the error goes on."""
    try:
        yield
    except BaseException:
        undo()
        raise
