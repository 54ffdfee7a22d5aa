"""What a task operator is: a small class, made once with its arguments, that turns rows into rows."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trinity_core.config import OperatorConfig
from trinity_core.data.files import Row
from trinity_core.errors import DataError, InputError
from trinity_core.files import file_digest
from trinity_core.pipelines.tasks.models import AskedModel
from trinity_core.registry import Registry


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a row cannot be used; it is rejected with the reason."""

    why: str


Outcome = list[Row] | Unusable
"""What becomes of a row: nothing (dropped), itself, or several; or why it is rejected."""


class Memory(Protocol):
    """What operators remember of earlier rows; kept on disk with the position, so that a retry remembers it too."""

    def add(self, operator: str, key: bytes) -> bool:
        """Remember a key. True if `operator` had not seen it before."""


INPUTS = ("models", "data_juicer_server")
"""`models`: a `TaskModels`; `data_juicer_server`: a `Processes`."""


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

    @property
    def asks(self) -> Sequence[AskedModel]:
        """Models that it asks."""
        return ()

    def start(self) -> None:
        """Load what it needs, once, before the first row. What this raises ends the pipeline."""

    def close(self) -> None:
        """Let go of what it holds, after the last row or a failure."""

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        """What becomes of each row. Must not change the rows given."""
        return [self.row(row, memory) for row in rows]

    def row(self, row: Row, memory: Memory) -> Outcome:
        """What becomes of one row."""
        raise NotImplementedError(f"{type(self).__name__} defines neither row nor rows")


TASK_OPERATORS: Registry[type[TaskOperator]] = Registry("task operator", inputs=INPUTS)
"""Parameters named in `INPUTS` are given by whoever makes an operator; all others are arguments."""


def text_of(row: Row, key: str) -> str:
    """The text in a column. Raises DataError where there is none."""
    value: Any = row.get(key)
    if not isinstance(value, str):
        problem = "has no" if value is None else "has no text in the"
        raise DataError(
            f"the row {problem} column '{key}'; its columns are {', '.join(map(str, row)) or 'none'}", key=key
        )
    return value


def checked_keys(operator: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The columns. Raises InputError if there are none."""
    if not keys:
        raise InputError(f"{operator}: input_keys must name at least one column", key="input_keys")
    return tuple(keys)


OURS = "trinity_core."
FORMAT = 2
"""Raised when the same pipeline of operators of this package would write another output than before."""


def fingerprint(
    files: Iterable[Path],
    configured: Sequence[OperatorConfig],
    operators: Sequence[TaskOperator],
    choices: Mapping[str, Any],
) -> str:
    """16 hex digits of contents, in order, not of names: a data set that was moved has the fingerprint it had.

    A plugin's operator counts with the source of its module, so that an edited one runs again; modules that it imports
    do not count. Those of this package count by `FORMAT`: an update that changes nothing of them runs nothing again.
    """
    parts = {
        "format": FORMAT,
        "inputs": [file_digest(file) for file in files],
        "operators": [
            {
                "name": settings.name,
                "args": dict(settings.args),
                "source": _source(TASK_OPERATORS.resolve(settings.name)),
                "files": [file_digest(file) for file in operator.files],
            }
            for settings, operator in zip(configured, operators, strict=True)
        ],
        "choices": dict(choices),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _source(kind: type[TaskOperator]) -> str:
    source = None if kind.__module__.startswith(OURS) else inspect.getsourcefile(kind)
    return file_digest(Path(source)) if source else f"{kind.__module__}.{kind.__qualname__}"
