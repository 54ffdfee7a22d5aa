"""Tasks that arrive while a run goes on: a table in a SQLite file, to which anyone may add rows.

    INSERT INTO taskset (task) VALUES ('{"question": "1 + 1?", "answer": "2"}');

A task is a JSON object with the columns that the task set's `format` names. SQLite gives ids in the order of commits,
so the order of tasks never changes. The task `null` ends the queue: no more tasks come.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_core.data.files import Row
from trinity_core.errors import DataError
from trinity_core.filesystems import networked

BUSY_SECONDS = 60.0
"""How long a writer is waited for."""
END = "null"


@dataclass(frozen=True, slots=True)
class TaskQueue:
    """The queue of one task set. Any number of processes may hold it."""

    path: Path
    name: str
    """The table."""

    def create(self) -> None:
        """Make file and table if they are missing. Raises DataError where they cannot be, or not on a local disk."""
        if kind := networked(self.path):
            raise DataError(f"the queue of task set '{self.name}' is on a network file system ({kind}: {self.path})")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._open() as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {self._table} (id INTEGER PRIMARY KEY AUTOINCREMENT, "
                    "task TEXT NOT NULL, added TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)"
                )
        except OSError as error:
            raise DataError(f"{self.path} cannot be made: {error}") from error

    def add(self, tasks: Iterable[Row]) -> int:
        """Add tasks in one transaction; returns how many. Raises DataError after the end."""
        return self._insert([json.dumps(task) for task in tasks])

    def end(self) -> None:
        """No more tasks come. Raises DataError if that was said before."""
        self._insert([END])

    def after(self, last: int) -> list[tuple[int, str]]:
        """(id, JSON text) of the tasks after the id `last`, in order."""
        with self._open() as connection:
            return connection.execute(
                f"SELECT id, task FROM {self._table} WHERE id > ? ORDER BY id",  # noqa: S608 - quoted
                (last,),
            ).fetchall()

    def count(self) -> tuple[int, bool]:
        """The number of tasks, and whether the queue has ended."""
        with self._open() as connection:
            return self._count(connection)

    def _insert(self, texts: list[str]) -> int:
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            count, ended = self._count(connection)
            if ended:
                connection.execute("ROLLBACK")
                raise DataError(f"the queue of task set '{self.name}' has ended after {count} tasks ({self.path})")
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
            raise DataError(f"the queue of task set '{self.name}' in {self.path} cannot be used: {error}") from error


def read_task(text: str) -> Any:
    """A task's JSON. Raises DataError if it is no object."""
    try:
        task = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"the task is no JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the task is no JSON: {error}") from error
    if not isinstance(task, dict):
        raise DataError("the task is no JSON object")
    return task


def read_tasks(lines: Iterable[str]) -> list[Row]:
    """The tasks in lines of JSON. Raises DataError with the number of a line that is no object."""
    tasks = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                tasks.append(read_task(line))
        except DataError as error:
            raise DataError(f"nothing was added, as line {number} of the input is no task: {error}") from error
    return tasks
