"""Task sets: rows read and checked before engines or trainer start."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from trinity_core.config.schema.buffer import FormatConfig, TasksetConfig
from trinity_core.data import formats
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.files import RejectedRow, Row, RowLocation, Rows, read_rows
from trinity_core.data.task import Task
from trinity_core.errors import DataError

logger = logging.getLogger(__name__)

LISTED = 5
"""Rejected rows listed one by one in messages; the rest are counted."""


@dataclass(slots=True)
class Taskset:
    """The tasks of one `TasksetConfig`. `taskset[i]` is the task of row i; rejected rows are not counted."""

    config: TasksetConfig
    rows: list[Row]
    locations: list[RowLocation]
    """The location of each row."""
    rejected: list[RejectedRow] = field(default_factory=list)
    """Rejected rows and their reasons."""
    is_eval: bool = False
    seed: int = 0

    @classmethod
    def open(cls, config: TasksetConfig, seed: int, is_eval: bool = False) -> Taskset:
        """Read and check the rows. Raises DataError if no row is usable."""
        read = read_rows(config.path, config.split, config.subset_name, config.storage_type, config.name)
        answered = any(config.format.response_key in row for row in read.rows)
        checked = reject_rows(read, lambda row: _check_task(row, config.format, answered), config.name)
        return cls(config, checked.rows, checked.locations, checked.rejected, is_eval, seed)

    @property
    def name(self) -> str:
        """Its name in metrics."""
        return self.config.name or "taskset"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        config = self.config
        return Task(
            index=index,
            raw=self.rows[index],
            taskset=self.name,
            workflow=config.default_workflow_type or "math_workflow",
            repeat_times=config.repeat_times or 1,
            reward_fn=config.default_reward_fn_type,
            rollout_args=config.rollout_args,
            format=config.format,
            workflow_args=copy.deepcopy(dict(config.workflow_args)),  # the user's code may change them
            reward_fn_args=copy.deepcopy(dict(config.reward_fn_args)),
            is_eval=self.is_eval,
            seed=self.seed,
            group=f"eval/{self.name}/{index}" if self.is_eval else "",
        )

    def tasks(self, limit: int | None = None) -> list[Task]:
        """The tasks of an evaluation in file order: all, or the first `limit`."""
        return [self[index] for index in range(len(self) if limit is None else min(limit, len(self)))]

    def without_long_prompts(self, encoder: ChatEncoder, max_tokens: int) -> Taskset:
        """The same task set without rows whose prompts have more than `max_tokens` tokens; these are rejected.

        For runs that do not truncate prompts. Raises DataError if no row is left.
        """
        prompts = [
            (formats.prompt_messages(row, self.config.format), formats.tools(row, self.config.format))
            for row in self.rows
        ]
        lengths = dict(zip(map(id, self.rows), encoder.prompt_lengths(prompts), strict=True))

        def check(row: Row) -> None:
            if lengths[id(row)] > max_tokens:
                raise DataError(f"the prompt has {lengths[id(row)]} tokens, more than the {max_tokens} allowed")

        kept = reject_rows(Rows(self.rows, self.locations, []), check, self.name)
        return Taskset(self.config, kept.rows, kept.locations, self.rejected + kept.rejected, self.is_eval, self.seed)


def reject_rows(read: Rows, check: Callable[[Row], object], name: str | None) -> Rows:
    """Reject the rows for which `check` raises DataError, and log them.

    Raises DataError, naming the first rows and reasons, if no row is left.
    """
    rows, locations, rejected = [], [], list(read.rejected)
    for row, location in zip(read.rows, read.locations, strict=True):
        try:
            check(row)
        except DataError as error:
            rejected.append(RejectedRow(location, str(error)))
        else:
            rows.append(row)
            locations.append(location)
    if not rows:
        raise DataError(f"data set '{name}' has no usable row: {list_rejected(rejected) or 'it is empty'}")
    log_rejected(rejected, len(rows), name)
    return Rows(rows, locations, rejected)


def log_rejected(rejected: list[RejectedRow], kept: int, name: str | None) -> None:
    """Log the rejected rows, if any."""
    if rejected:
        logger.warning(
            "Data set '%s': %d of %d rows rejected: %s",
            name,
            len(rejected),
            len(rejected) + kept,
            list_rejected(rejected),
        )


def list_rejected(rejected: list[RejectedRow]) -> str:
    """One line with the first rejected rows and the number of the others."""
    more = f"; and {len(rejected) - LISTED} more" if len(rejected) > LISTED else ""
    return "; ".join(map(str, rejected[:LISTED])) + more


def _check_task(row: Row, form: FormatConfig, answered: bool) -> None:
    """Raise DataError for a bad row. With `answered` the set has reference answers, so each row needs one."""
    formats.prompt_messages(row, form)
    formats.tools(row, form)
    answer = formats.truth(row, form)
    if answered and (answer is None or (isinstance(answer, str) and not answer.strip())):
        wrong = "is empty" if form.response_key in row else "is missing here, while other rows have it"
        raise DataError(f"column '{form.response_key}' (format.response_key) {wrong}")
