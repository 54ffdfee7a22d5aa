"""Errors for users: one sentence on what is wrong, one on what to do, and the closest known name for a typo."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SIMILAR = 0.66
"""Least similarity (`difflib`'s ratio) of a typo and the word that was meant."""


class TrinityError(Exception):
    """An error for users, with what to do about it. Never retried: the same run would fail the same way.

    A message names the key, file, line or actor concerned. The error survives pickling, so Ray and Prefect pass it on
    intact.
    """

    exit_code = 1
    """Of a command that ends with it."""

    def __init__(self, *args: object, key: str = "") -> None:
        """`key`: the configuration key, argument, column, tensor, name or file at fault, for programs."""
        super().__init__(*args)
        self.key = key


class DataError(TrinityError):
    """A data set, one of its rows or a checkpoint cannot be used."""


class InputError(TrinityError, ValueError):
    """An invalid argument: a missing or misshapen tensor, a NaN, an unknown name."""


class RewardError(TrinityError):
    """A reward function returned an invalid reward, such as an accuracy of -1. No row is at fault."""


class WeightSyncError(TrinityError):
    """An engine does not hold the weights that the trainer published."""


class EndpointError(TrinityError):
    """An external endpoint refuses every request: wrong key, unknown model."""


class ModelError(TrinityError):
    """A model cannot be called at all: no address, no key, no engine that starts. No question or row is at fault."""


class Unanswered(TrinityError):
    """An external endpoint never answered a request. The answer is missing, not wrong."""


class Paused(TrinityError):
    """The run has saved, and waits for a person's decision."""


class TransientFault(Exception):
    """A failure outside the run's control, worth a retry: a dead actor, a lost node, a time-out."""


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything, including cancellation and SystemExit, and re-raise it."""
    try:
        yield
    except BaseException:
        undo()
        raise


def faults_text(faults: Iterable[Mapping[str, Any]]) -> str:
    """Format pydantic's errors (`ValidationError.errors()`) in one line: `field.name: what is wrong; …`."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}".lstrip(": ")
        for fault in faults
    )


def closest(word: str, words: Iterable[str], similar: float = SIMILAR) -> str:
    """Return the known word that `word` may be a typo of, ignoring case, or ""."""
    names = {name.lower(): name for name in words}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=similar)
    return names[near[0]] if near and len(word) > 2 else ""
