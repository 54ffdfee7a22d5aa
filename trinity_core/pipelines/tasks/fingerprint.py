"""The fingerprint of a task pipeline: equal for equal contents of its inputs, equal operators and equal choices."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, TaskOperator

FORMAT = 2
"""Raised when the same pipeline would write another output than before."""


def fingerprint(
    files: Iterable[Path],
    configured: Sequence[OperatorConfig],
    operators: Sequence[TaskOperator],
    choices: Mapping[str, Any],
) -> str:
    """16 hex digits of contents, in order, not of names: a data set that was moved has the fingerprint it had.

    An operator counts with the source of its module, so that an edited plugin runs again; modules that it imports do
    not count.
    """
    parts = {
        "format": FORMAT,
        "inputs": [_contents(file) for file in files],
        "operators": [
            {
                "name": each.name,
                "args": dict(each.args),
                "source": _source(TASK_OPERATORS.resolve(each.name)),
                "files": [_contents(file) for file in operator.files],
            }
            for each, operator in zip(configured, operators, strict=True)
        ],
        "choices": dict(choices),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _contents(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _source(kind: type[TaskOperator]) -> str:
    source = inspect.getsourcefile(kind)
    return _contents(Path(source)) if source else kind.__qualname__
