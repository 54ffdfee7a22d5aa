"""Task sets: rows that have been read and checked before anything heavy starts."""

from __future__ import annotations

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
"""Bad rows named one by one in messages; the rest are counted."""


@dataclass(slots=True)
class Taskset:
    """The tasks of one `TasksetConfig`. `taskset[i]` is the task of row i; rows that were set aside do not count."""

    config: TasksetConfig
    rows: list[Row]
    locations: list[RowLocation]
    """Where each row stands."""
    rejected: list[RejectedRow] = field(default_factory=list)
    """Rows set aside, and why."""
    is_eval: bool = False
    seed: int = 0

    @classmethod
    def open(cls, config: TasksetConfig, seed: int, is_eval: bool = False) -> Taskset:
        """Read and check the rows. Raises DataError where none can be used."""
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
            workflow_args=config.workflow_args,
            reward_fn_args=config.reward_fn_args,
            is_eval=self.is_eval,
            seed=self.seed,
            group=f"eval/{self.name}/{index}" if self.is_eval else "",
        )

    def tasks(self, limit: int | None = None) -> list[Task]:
        """The tasks in file order, all or the first `limit`: what an evaluation goes through."""
        return [self[index] for index in range(len(self) if limit is None else min(limit, len(self)))]

    def without_long_prompts(self, encoder: ChatEncoder, max_tokens: int) -> Taskset:
        """The same task set with the rows set aside whose prompts have more than `max_tokens` tokens.

        For runs that do not truncate prompts. Raises DataError where no row is left.
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
    """Split rows into those that `check` accepts and those for which it raises DataError; log what is set aside.

    Raises DataError, naming the first rows and reasons, where none is left.
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
    """Say in the log which rows were set aside, if any."""
    if rejected:
        logger.warning(
            "Data set '%s': %d of %d rows rejected: %s",
            name,
            len(rejected),
            len(rejected) + kept,
            list_rejected(rejected),
        )


def list_rejected(rejected: list[RejectedRow]) -> str:
    """The first rejected rows and how many more there are, on one line."""
    more = f"; and {len(rejected) - LISTED} more" if len(rejected) > LISTED else ""
    return "; ".join(map(str, rejected[:LISTED])) + more


def _check_task(row: Row, form: FormatConfig, answered: bool) -> None:
    """`answered`: the set has a column of reference answers, so that each row must have one."""
    formats.prompt_messages(row, form)
    formats.tools(row, form)
    answer = formats.truth(row, form)
    if answered and (answer is None or (isinstance(answer, str) and not answer.strip())):
        wrong = "is empty" if form.response_key in row else "is missing here, while other rows have it"
        raise DataError(f"column '{form.response_key}' (format.response_key) {wrong}")
