"""What a task operator is: a small class, made once with its arguments, that turns rows into rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trinity_core.data.files import Row
from trinity_core.errors import DataError, InputError
from trinity_core.registry import Registry


class Memory(Protocol):
    """What operators remember of earlier rows; kept on disk with the position, so that a retry remembers it too."""

    def add(self, operator: str, key: bytes) -> bool:
        """Remember a key. True if `operator` had not seen it before."""


class TaskOperator:
    """Base of all task operators. An operator overrides `row`, or `rows` where many at once are faster (a model).

    It must be deterministic in its arguments, its files and the rows so far: a killed pipeline repeats its last chunk.
    """

    label: str = ""
    """Its place and name in the pipeline, unique there."""

    @property
    def files(self) -> Sequence[Path]:
        """Files whose contents decide what it does; they are part of the fingerprint."""
        return ()

    def start(self) -> None:
        """Load what it needs, once, before the first row. What this raises ends the pipeline."""

    def rows(self, given: Sequence[Row], memory: Memory) -> list[list[Row]]:
        """What becomes of each row: nothing (dropped), itself, or several. Must not change the rows given."""
        return [self.row(row, memory) for row in given]

    def row(self, row: Row, memory: Memory) -> list[Row]:
        """What becomes of one row."""
        raise NotImplementedError(f"{type(self).__name__} defines neither row nor rows")


TASK_OPERATORS: Registry[type[TaskOperator]] = Registry("task operator")


def text_of(row: Row, key: str) -> str:
    """The text in a column. Raises DataError where there is none."""
    value: Any = row.get(key)
    if not isinstance(value, str):
        problem = "has no" if value is None else "has no text in the"
        raise DataError(f"the row {problem} column '{key}'; its columns are {', '.join(map(str, row)) or 'none'}")
    return value


def checked_keys(operator: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The columns. Raises InputError if there are none."""
    if not keys:
        raise InputError(f"{operator}: input_keys must name at least one column")
    return tuple(keys)
