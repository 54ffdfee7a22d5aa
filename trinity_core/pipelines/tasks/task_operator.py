"""The interface of task operators: small classes, created once with their arguments, that turn rows into rows."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.files import file_digest
from trinity_core.base.registry import Registry
from trinity_core.config import OperatorConfig
from trinity_core.data.files import Row
from trinity_core.pipelines.tasks.models import AskedModel


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a row is unusable; the row is rejected with this reason."""

    why: str


Outcome = list[Row] | Unusable
"""The result for a row: nothing (dropped), the row, or several; or why it is rejected."""


class Memory(Protocol):
    """What operators remember about earlier rows; kept on disk with the position, so that it survives a retry."""

    def add(self, operator: str, key: bytes) -> bool:
        """Remember a key. Return True if `operator` had not seen it before."""


INPUTS = ("models", "data_juicer_server", "plugin_dir")
"""`models`: a `TaskModels`; `data_juicer_server`: a `Processes`; `plugin_dir`: the run's, or None."""


class TaskOperator:
    """Base of all task operators. Override `row`, or `rows` if batches are faster (as for a model).

    An operator must be deterministic in its arguments, its files and the rows so far: a killed pipeline repeats its
    last chunk.
    """

    label: str = ""
    """Its position and name in the pipeline, unique there."""
    revision: ClassVar[int] = 0
    """Raised whenever one of our operators would write a different output than before."""

    @property
    def files(self) -> Sequence[Path]:
        """Files whose contents affect the operator; they are part of the fingerprint."""
        return ()

    @property
    def asks(self) -> Sequence[AskedModel]:
        """Models that it asks."""
        return ()

    def start(self) -> None:
        """Load resources once, before the first row. Errors end the pipeline."""

    def close(self) -> None:
        """Release resources, after the last row or a failure."""

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        """Return the outcome of each row. Must not change the given rows."""
        return [self.row(row, memory) for row in rows]

    def row(self, row: Row, memory: Memory) -> Outcome:
        """Return the outcome of one row."""
        raise NotImplementedError(f"{type(self).__name__} defines neither row nor rows")


TASK_OPERATORS: Registry[type[TaskOperator]] = Registry("task operator", inputs=INPUTS)
"""Parameters named in `INPUTS` are filled by the code that creates an operator; all others are arguments."""


def text_of(row: Row, key: str) -> str:
    """Return the text in a column. Raises DataError if there is none."""
    value: Any = row.get(key)
    if not isinstance(value, str):
        problem = "has no" if value is None else "has no text in the"
        raise DataError(
            f"the row {problem} column '{key}'; its columns are {', '.join(map(str, row)) or 'none'}", key=key
        )
    return value


def checked_keys(operator: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the columns. Raises InputError if there are none."""
    if not keys:
        raise InputError(f"{operator}: input_keys must name at least one column", key="input_keys")
    return tuple(keys)


OURS = "trinity_core."
FORMAT = 2
"""Raised whenever the same pipeline would write a different output than before, whatever its operators."""


def fingerprint(
    files: Iterable[Path],
    configured: Sequence[OperatorConfig],
    operators: Sequence[TaskOperator],
    choices: Mapping[str, Any],
) -> str:
    """Return 16 hex digits over contents, in order, without file names: a moved data set keeps its fingerprint.

    A plugin's operator or reward function counts with the source of its module, so that an edited one runs again;
    modules that it imports do not count. Our own operators count by their `revision`: an update that does not change
    those of a pipeline repeats nothing.
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
    source = plugin_file(kind)
    if source:
        return file_digest(source)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" {kind.revision}" if kind.revision else "")


def plugin_file(part: Any) -> Path | None:
    """Return the file of the module that defines an operator or a reward function; None if it is one of ours."""
    module: str = part.__module__
    file = None if module.startswith(OURS) else getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None
