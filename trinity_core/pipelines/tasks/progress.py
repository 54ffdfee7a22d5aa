"""Progress of a task pipeline: position, kept rows and the operators' memory, in one SQLite file.

All changes by a chunk of rows are one transaction. So a killed pipeline stops at the end of a chunk, and continuing it
gives the output of a pipeline that was never killed. Rows wait on disk, so that sorting them takes no memory.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from trinity_core.base.errors import on_failure
from trinity_core.data.files import RejectedRow, Row
from trinity_core.data.values import plain

CACHE_KIB = 16384
TABLES = """
create table if not exists position (one integer primary key check (one = 1), read integer not null);
create table if not exists kept (id integer primary key, priority real not null, row text not null);
create table if not exists seen (operator text not null, key blob not null, primary key (operator, key)) without rowid;
create table if not exists dropped (operator text primary key, number integer not null) without rowid;
create table if not exists rejected (id integer primary key, source text not null, line integer not null,
    reason text not null);
insert or ignore into position values (1, 0);
"""


class PipelineProgress:
    """The state of one pipeline, opened by one process at a time. It is also its operators' memory."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute(f"pragma cache_size = -{CACHE_KIB}")
        self._database.executescript(TABLES)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """Commit all changes within the block together, or none of them."""
        with self._between("begin immediate", "commit", "rollback"):
            yield

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo the block's changes, part of a chunk, if it raises."""
        with self._between("savepoint attempt", "release attempt", "rollback to attempt"):
            yield

    @contextmanager
    def _between(self, begin: str, end: str, undo: str) -> Iterator[None]:
        self._database.execute(begin)
        with on_failure(partial(self._database.execute, undo)):
            yield
        self._database.execute(end)

    @property
    def read(self) -> int:
        """Number of input rows done, including rejected ones."""
        return self._number("select read from position")

    @property
    def kept(self) -> int:
        """Number of rows that all operators kept or created."""
        return self._number("select count(*) from kept")

    @property
    def rejected(self) -> int:
        """Number of rows that could not be read, or on which an operator failed."""
        return self._number("select count(*) from rejected")

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self._database.execute("select operator, number from dropped"))

    def advance(self, rows: int) -> None:
        self._database.execute("update position set read = read + ?", (rows,))

    def keep(self, row: Row, priority: float) -> None:
        """Add a row to the output. Raises DataError if it contains values that JSON cannot represent, such as bytes."""
        text = json.dumps(row, ensure_ascii=False, default=plain)
        self._database.execute("insert into kept (priority, row) values (?, ?)", (priority, text))

    def drop(self, operator: str, number: int) -> None:
        self._database.execute(
            "insert into dropped values (?, ?) on conflict do update set number = number + excluded.number",
            (operator, number),
        )

    def reject(self, row: RejectedRow) -> None:
        self._database.execute(
            "insert into rejected (source, line, reason) values (?, ?, ?)",
            (row.location.source, row.location.line, row.reason),
        )

    def add(self, operator: str, key: bytes) -> bool:
        return self._database.execute("insert or ignore into seen values (?, ?)", (operator, key)).rowcount == 1

    def ordered(self, limit: int | None) -> Iterator[str]:
        """Yield the first `limit` kept rows as JSON, highest priority first; ties in order of insertion."""
        limit = -1 if limit is None else limit
        query = "select row from kept order by priority desc, id limit ?"
        return (text for (text,) in self._database.execute(query, (limit,)))

    def set_aside(self, limit: int | None = None) -> Iterator[tuple[str, int, str]]:
        """Yield file, line and reason of the first `limit` rejected rows."""
        limit = -1 if limit is None else limit
        return iter(self._database.execute("select source, line, reason from rejected order by id limit ?", (limit,)))

    def _number(self, query: str) -> int:
        return int(self._database.execute(query).fetchone()[0])
