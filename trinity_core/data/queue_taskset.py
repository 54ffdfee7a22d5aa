"""A task set of `storage_type: queue`: its tasks are taken once each, in the order of arrival."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from trinity_core.config.paths import task_queue_path
from trinity_core.config.schema import Config, TasksetConfig
from trinity_core.data.files import RejectedRow, Row, RowLocation
from trinity_core.data.formats import has_column
from trinity_core.data.row_validation import row_problem
from trinity_core.data.task_queue import END, TaskQueue, read_task
from trinity_core.data.taskset import CHUNK, PromptCheck, Taskset, row_problems
from trinity_core.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class QueueTaskset(Taskset):
    """The tasks that have arrived so far. Bad ones are rejected and logged as they arrive."""

    queue: TaskQueue | None = None
    prompts: PromptCheck | None = None
    ended: bool = False
    """True if no more tasks come."""
    last: int = 0
    """Id of the last task that was read."""

    @classmethod
    def of(cls, config: Config, taskset: TasksetConfig, prompts: PromptCheck | None = None) -> QueueTaskset:
        """The task set of a run, with what has arrived. Raises DataError if the queue cannot be used."""
        queue = queue_of(config, taskset)
        queue.create()
        opened = cls(taskset, [], [], seed=config.seed, queue=queue, prompts=prompts)
        opened.grow()
        return opened

    def grow(self) -> None:
        """Read the tasks that have arrived since."""
        assert self.queue is not None
        found = [] if self.ended else self.queue.after(self.last)
        texts = list(takewhile(lambda each: each[1].strip() != END, found))
        self.ended = self.ended or len(texts) < len(found)
        self.last = found[-1][0] if found else self.last
        read = [(self._location(number), _read(text)) for number, text in texts]
        for start in range(0, len(read), CHUNK):
            self._take(read[start : start + CHUNK])

    def _location(self, number: int) -> RowLocation:
        assert self.queue is not None
        return RowLocation(f"{self.queue.path} ({self.queue.name})", number)

    def _take(self, read: Sequence[tuple[RowLocation, Row | DataError]]) -> None:
        """Keep the usable ones. If the first task of all has a reference answer, each needs one."""
        rows = [row for _, row in read if not isinstance(row, DataError)]
        form = self.config.format
        answered = any(has_column(row, form.response_key) for row in (self.rows or rows)[:1])
        problems = iter(row_problems(rows, form, answered, (), self.prompts))
        for location, row in read:
            problem = row if isinstance(row, DataError) else next(problems)
            if problem is None and not isinstance(row, DataError):
                self.rows.append(row)
                self.locations.append(location)
            else:
                self.rejected.append(RejectedRow(location, str(problem)))
                logger.warning("Data set '%s': a task is rejected: %s", self.name, self.rejected[-1])

    def features(self) -> np.ndarray:
        """See `Taskset`: none, as the order is that of arrival."""
        return np.empty((len(self), 0))


def _read(text: str) -> Row | DataError:
    try:
        row = read_task(text)
        reason = row_problem(row)
        return DataError(f"the row {reason}") if reason else row
    except DataError as error:
        return error


def find_queue(configs: Sequence[Config], name: str | None) -> TaskQueue:
    """The queue of that name among the training task sets of a run's stages; without a name the only one.

    Raises DataError if there is none or several.
    """
    found = [
        queue_of(config, taskset)
        for config in configs
        for taskset in config.buffer.explorer_input.tasksets
        if taskset.storage_type == "queue" and name in (None, taskset.name)
    ]
    if len(set(found)) != 1:
        named = f" called '{name}'" if name else ""
        there = f"{len(set(found))} task sets{named}" if found else f"no task set{named}"
        raise DataError(f"the configuration has {there} of storage_type: queue; name one with --taskset")
    return found[0]


def queue_of(config: Config, taskset: TasksetConfig) -> TaskQueue:
    """The queue of a task set of a run."""
    return TaskQueue(task_queue_path(config, taskset), taskset.subset_name or taskset.name or "taskset")
