"""The errors a user is meant to read: one clear sentence on what is wrong, one on what to do, and what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class TrinityError(Exception):
    """What is wrong and what to do about it. Never retried: the same run would fail the same way.

    A message names the key, file, line or actor concerned. It survives pickling, so Ray and Prefect pass it on whole.
    """

    def __init__(self, *args: object, key: str = "") -> None:
        """`key`: the configuration key, argument, column, tensor, name or file at fault, for programs to read."""
        super().__init__(*args)
        self.key = key


class DataError(TrinityError):
    """A data set, a row of it or a checkpoint cannot be used as it is."""


class InputError(TrinityError, ValueError):
    """An argument cannot be used: a missing or misshapen tensor, a NaN, an unknown name."""


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
    """Call `undo` if the block raises anything, a cancellation or SystemExit included, and re-raise it."""
    try:
        yield
    except BaseException:
        undo()
        raise


def faults_text(faults: Iterable[Mapping[str, Any]]) -> str:
    """pydantic's errors (`ValidationError.errors()`) in one line: `field.name: what is wrong; …`."""
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".lstrip(": ") for fault in faults)


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that this one may be a typo of, or an empty string.

    One edit for every four letters is allowed, one in shorter words, none in those of fewer than three letters.
    """
    near = []
    for other in known:
        allowed, longer = max(min(len(word), len(other)) // 4, 1), abs(len(word) - len(other))
        if longer <= allowed and (edits := distance(word.lower(), other.lower())) <= allowed:
            near.append((edits, longer, other))
    return min(near, key=lambda entry: entry[:2])[2] if near and len(word) > 2 else ""


def distance(one: str, other: str) -> int:
    """Letters to add, drop, replace or swap with the next one to make `other` of `one` (optimal string alignment)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            best = min(row[j - 1] + 1, last[j] + 1, last[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (one[i - 2], letter) == (wanted, other[j - 2]):
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]
