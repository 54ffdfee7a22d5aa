"""Tasks that arrive during a run: a table in a SQLite file, to which anyone may add rows.

  INSERT INTO taskset (task) VALUES ('{"question": "1 + 1?", "answer": "2"}');

A task is a JSON object with the columns that the task set's `format` names. SQLite assigns ids in commit order, so the
order of tasks never changes. The task `null` ends the queue.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.base.files import networked, private_file, private_folder
from trinity_core.config.paths import task_queue_path
from trinity_core.config.schema import Config, TasksetConfig
from trinity_core.data.files import RejectedRow, Row, RowLocation
from trinity_core.data.formats import has_column
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.taskset import CHUNK, PromptCheck, Taskset, needs_prompt, reference_checks, row_problems
from trinity_core.data.values import row_problem

BUSY_SECONDS = 60.0
"""Longest wait for another writer."""
END = "null"


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """The queue of one task set. Any number of processes may use it."""

    path: Path
    name: str

    def create(self) -> None:
        """Create file and table if missing. Raises DataError if that fails, or the disk is not local."""
        if kind := networked(self.path):
            raise DataError(f"the queue of task set '{self.name}' is on a network file system ({kind}: {self.path})")
        try:
            private_folder(self.path.parent)
            private_file(self.path)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._table} (id INTEGER PRIMARY KEY AUTOINCREMENT, "
                    "task TEXT NOT NULL, added TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
                )
        except OSError as error:
            raise DataError(f"{self.path} cannot be made: {error}") from error

    def add(self, tasks: Iterable[Row]) -> int:
        """Add tasks in one transaction; return how many. Raises DataError after the end."""
        return self._insert([json.dumps(task) for task in tasks])

    def end(self) -> None:
        """End the queue. Raises DataError if it has already ended."""
        self._insert([END])

    def after(self, last: int) -> list[tuple[int, str]]:
        """Return (id, JSON text) of the tasks after the id `last`, in order."""
        with self._open() as connection:
            return connection.execute(
                f"SELECT id, task FROM {self._table} WHERE id > ? ORDER BY id",  # noqa: S608 - quoted
                (last,),
            ).fetchall()

    def count(self) -> tuple[int, bool]:
        """Return the number of tasks, and whether the queue has ended."""
        with self._open() as connection:
            return self._count(connection)

    def _insert(self, texts: list[str]) -> int:
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            count, ended = self._count(connection)
            if ended:
                connection.execute("ROLLBACK")
                raise DataError(
                    f"the queue of task set '{self.name}' has ended after {count} tasks ({self.path})", key=self.name
                )
            connection.executemany(
                f"INSERT INTO {self._table} (task) VALUES (?)",  # noqa: S608 - quoted
                [(text,) for text in texts],
            )
            connection.execute("COMMIT")
        return len(texts)

    def _count(self, connection: sqlite3.Connection) -> tuple[int, bool]:
        (rows, ends) = connection.execute(
            f"SELECT COUNT(*), COUNT(*) FILTER (WHERE TRIM(task) = '{END}') FROM {self._table}"  # noqa: S608 - quoted
        ).fetchone()
        return rows - ends, bool(ends)

    @property
    def _table(self) -> str:
        return '"' + self.name.replace('"', '""') + '"'

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise DataError(
                f"the queue of task set '{self.name}' in {self.path} cannot be used: {error}", key=self.name
            ) from error


def read_task(text: str) -> Row:
    """Parse a task's JSON. Raises DataError if it is not an object, or holds what a row may not."""
    try:
        task: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"the task is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the task is not JSON: {error}") from error
    if not isinstance(task, dict):
        raise DataError("the task is not a JSON object")
    if reason := row_problem(task):
        raise DataError(f"the row {reason}")
    return task


def read_tasks(lines: Iterable[str]) -> list[Row]:
    """Parse tasks, one JSON object a line. Raises DataError with the number of an invalid line."""
    tasks = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                tasks.append(read_task(line))
        except DataError as error:
            raise DataError(f"nothing was added, as line {number} of the input is not a task: {error}") from error
    return tasks


@dataclass(slots=True)
class QueueTaskset(Taskset):
    """The tasks that have arrived so far. Bad ones are rejected, logged and recorded as they arrive."""

    queue: TaskQueue | None = None
    prompts: PromptCheck | None = None
    rejected_rows: RejectedRows = field(default_factory=RejectedRows)
    ended: bool = False
    """True if the queue has ended."""
    last: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        taskset: TasksetConfig,
        prompts: PromptCheck | None = None,
        rejected_rows: RejectedRows | None = None,
    ) -> QueueTaskset:
        """Return the task set of a run, with the tasks that have arrived. Raises DataError if the queue cannot be
        used."""
        queue = queue_of(config, taskset)
        queue.create()
        opened = cls(taskset, [], [], seed=config.seed, queue=queue, prompts=prompts)
        opened.rejected_rows = rejected_rows or RejectedRows()
        opened.rejected_rows.write(opened.name, [])  # each start reads all tasks
        opened.grow()
        return opened

    def grow(self) -> None:
        """Read newly arrived tasks."""
        assert self.queue is not None
        lines = [] if self.ended else self.queue.after(self.last)
        texts = list(takewhile(lambda line: line[1].strip() != END, lines))
        self.ended = self.ended or len(texts) < len(lines)
        self.last = lines[-1][0] if lines else self.last
        read = [(self._location(number), _read(text)) for number, text in texts]
        for start in range(0, len(read), CHUNK):
            self._take(read[start : start + CHUNK])

    def id_of(self, number: int) -> int:
        """Return the id of usable task `number`, from 1; 0 for 0."""
        return self.locations[number - 1].line if number else 0

    def count_to(self, last: int) -> int:
        """Return the number of usable tasks up to the id `last`."""
        return bisect_right(self.locations, last, key=lambda location: location.line)

    def _location(self, number: int) -> RowLocation:
        assert self.queue is not None
        return RowLocation(f"{self.queue.path} ({self.queue.name})", number)

    def _take(self, read: Sequence[tuple[RowLocation, Row | DataError]]) -> None:
        """Keep the usable tasks. If the very first task has a reference answer, each needs one."""
        rows = [row for _, row in read if not isinstance(row, DataError)]
        form = self.format
        answered = any(has_column(row, form.response_key) for row in (self.rows or rows)[:1])
        kinds = reference_checks(self.config)
        problems = iter(row_problems(rows, form, answered, (), self.prompts, needs_prompt(self.config), kinds))
        rejected: list[RejectedRow] = []
        for location, row in read:
            problem = row if isinstance(row, DataError) else next(problems)
            if problem is None and not isinstance(row, DataError):
                self.rows.append(row)
                self.locations.append(location)
            else:
                rejected.append(RejectedRow(location, str(problem)))
        self.rejected += rejected
        self.rejected_rows.append(self.name, rejected)

    def features(self) -> np.ndarray:
        """None, as the order is that of arrival."""
        return np.empty((len(self), 0))


def _read(text: str) -> Row | DataError:
    try:
        return read_task(text)
    except DataError as error:
        return error


def find_queue(configs: Sequence[Config], name: str | None) -> TaskQueue:
    """Return the queue of that name among the training task sets of a run's stages; without a name the only one.

    Raises DataError if there is none or several.
    """
    queues = [
        queue_of(config, taskset)
        for config in configs
        for taskset in config.buffer.explorer_input.tasksets
        if taskset.storage_type == "queue" and name in (None, taskset.name)
    ]
    if len(set(queues)) != 1:
        called = f" called '{name}'" if name else ""
        queue_count = f"{len(set(queues))} task sets{called}" if queues else f"no task set{called}"
        raise DataError(f"the configuration has {queue_count} of storage_type: queue; name one with --taskset")
    return queues[0]


def queue_of(config: Config, taskset: TasksetConfig) -> TaskQueue:
    return TaskQueue(task_queue_path(config, taskset), taskset.subset_name or taskset.name or "taskset")
