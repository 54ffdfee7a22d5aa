"""Inputs of the experience pipeline: rows of data sets, joined to experiences by a column that their tasks also
have."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.config.schema import Config, ExperienceInputConfig
from trinity_core.data.files import RejectedRow, Row, read_rows
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.taskset import Taskset
from trinity_core.data.values import plain

log = logging.getLogger(__name__)

Json = Any


@dataclass(frozen=True, slots=True)
class JoinedInput:
    name: str
    join_key: str
    rows: Mapping[str, Mapping[str, Json]]
    """Key -> the joined columns, named `<input>.<column>`."""

    def columns(self, task: Row) -> Mapping[str, Json]:
        """Return the columns for the experiences of a task, from its row; empty if no row has its key."""
        key = comparable(task.get(self.join_key))
        return {} if key is None else self.rows.get(key, {})


@dataclass(frozen=True, slots=True)
class JoinedInputs:
    inputs: Sequence[JoinedInput] = ()

    def columns(self, task: Row) -> dict[str, Json]:
        return {name: value for joined in self.inputs for name, value in joined.columns(task).items()}


def open_inputs(config: Config, tasksets: Sequence[Taskset], rejected_rows: RejectedRows) -> JoinedInputs:
    """Read the inputs of a run's experience pipeline into memory.

    Raises DataError if one cannot be read, more of its rows are rejected than `rejected_rows` allows, or none of its
    rows belongs to a task.
    """
    inputs = [_opened(name, settings, rejected_rows) for name, settings in inputs_of(config)]
    for joined in inputs:
        _check(joined, tasksets)
    return JoinedInputs(inputs)


def inputs_of(config: Config) -> Iterator[tuple[str, ExperienceInputConfig]]:
    """Yield the configured inputs by name; none for a run that does not explore."""
    if config.explores:
        yield from config.data_processor.experience_pipeline.inputs.items()


def input_row(name: str, settings: ExperienceInputConfig, row: Row) -> tuple[str, dict[str, Json]]:
    """Return key and joined columns of a row. Raises DataError if it lacks one of them."""
    if missing := [column for column in (settings.join_key, *settings.columns) if column not in row]:
        raise DataError(
            f"the row has no column '{missing[0]}'; its columns are {', '.join(row) or 'none'}", key=missing[0]
        )
    key = comparable(row[settings.join_key])
    if key is None:
        raise DataError(
            f"the column '{settings.join_key}' (join_key) holds neither text nor a whole number", key=settings.join_key
        )
    columns = settings.columns or [column for column in row if column != settings.join_key]
    return key, {f"{name}.{column}": _json(row[column]) for column in columns}


def comparable(value: Any) -> str | None:
    """Return a key as a string, so that 7 in a table equals "7" in a CSV file; None for other types."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _opened(name: str, settings: ExperienceInputConfig, rejected_rows: RejectedRows) -> JoinedInput:
    read = read_rows(settings.path, settings.split, settings.subset_name, settings.storage_type, name)
    rows: dict[str, dict[str, Json]] = {}
    rejected = list(read.rejected)
    for location, row in zip(read.locations, read.rows, strict=True):
        try:
            key, columns = input_row(name, settings, row)
            if key in rows:
                raise DataError(f"an earlier row has the same {settings.join_key}, {key!r}")
            rows[key] = columns
        except DataError as error:
            rejected.append(RejectedRow(location, str(error)))
    rejected_rows.settle(f"input-{name}", rejected, len(rows))
    return JoinedInput(name, settings.join_key, rows)


def _json(value: Any) -> Json:
    """Convert a value to JSON, without infinities. Raises DataError if JSON cannot hold it."""
    value = json.loads(json.dumps(value, default=plain))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _check(joined: JoinedInput, tasksets: Sequence[Taskset]) -> None:
    """Log how many tasks have a row. Raises DataError if none has, and none can arrive later."""
    joined_tasks = 0
    for taskset in tasksets:
        count = sum(bool(joined.columns(row)) for row in taskset.rows)
        log.info("Input '%s' has rows for %d of %d tasks of '%s'", joined.name, count, len(taskset), taskset.name)
        joined_tasks += count
    if joined_tasks or any(taskset.config.storage_type == "queue" for taskset in tasksets):
        return
    columns = dict.fromkeys(column for taskset in tasksets for row in taskset.rows[:1] for column in row)
    raise DataError(
        f"input '{joined.name}' belongs to no task: none has a {joined.join_key} (join_key) that a row of it has; "
        f"columns of tasks are {', '.join(columns)}",
        key=joined.name,
    )
