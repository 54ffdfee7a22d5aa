"""The experience database: opening it, serialising its writers, and explaining its errors.

A power cut may lose SQLite's last transactions (WAL, `synchronous=NORMAL`), newest first and each as a whole, but never
the database. The system is built for that: rows and the explorer's position are lost together and sampled again, and
`Database.flush` runs before a checkpoint is named, so that no checkpoint outlives the record of its training data. A
killed process loses nothing that was committed.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, insert, make_url, select, update
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
)

from trinity_core.config.public import without_password
from trinity_core.errors import DataError, TransientFault, TrinityError
from trinity_core.files import clear_errors
from trinity_core.store.schema import SCHEMA_VERSION, Tables

BUSY_TIMEOUT = 60.0
"""Seconds that a writer waits for the others. A transaction takes milliseconds, so a longer wait means a hang."""


def _unusable(url: str) -> TrinityError:
    """The error for a bad URL, without its cause, which may contain the password."""
    return TrinityError(
        f"experience_buffer.path {without_password(url)!r} is no database that can be used: write "
        "postgresql://user:password@host/database, or sqlite:///name.db for a file"
    )


def _engine(url: URL) -> Engine:
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise _unusable(url.render_as_string(hide_password=True))
    if url.get_backend_name() != "sqlite":
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return create_engine(url, pool_pre_ping=True)
    if not url.database or url.database == ":memory:":
        raise TrinityError("the experience store must outlive its process: give a file, not an in-memory database")
    with clear_errors("making", Path(url.database).parent):
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT, "isolation_level": None})

    @event.listens_for(engine, "connect")
    def _(connection, record) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA cache_size=-65536")

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        # A reader that becomes a writer may be refused at once, so a writer declares itself at the start.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def explain(error: DatabaseError | sqlite3.Error, url: URL) -> Exception | None:
    """The user-facing error for one of SQLAlchemy or SQLite; None for a programming error, which is not translated."""
    text = str(error.orig if isinstance(error, DatabaseError) else error)
    where = url.render_as_string(hide_password=True)
    if isinstance(error, IntegrityError | ProgrammingError | sqlite3.IntegrityError | sqlite3.ProgrammingError):
        return None
    if "locked" in text:
        return TransientFault(f"the experience store {where} was locked for {BUSY_TIMEOUT:g} s: {text}")
    for sign, advice in _ADVICE.items():
        if sign in text:
            return TrinityError(f"the experience store {where} cannot be used ({text}): {advice}")
    if "malformed" in text or "not a database" in text:
        return DataError(f"the experience store {where} is damaged ({text}): restore it, or move it away to start over")
    if isinstance(error, OperationalError | sqlite3.OperationalError):
        return TransientFault(f"the experience store {where} does not answer: {text.strip()}")
    return None


_ADVICE = {
    "disk is full": "free some space",
    "unable to open": "its folder must exist and be writable",
    "readonly": "make the file and its folder writable",
    "disk I/O": "look at the disk and its free space",
    "authentication failed": "look at user and password in its URL",
    "does not exist": "create the database or correct its name in the URL",
}


class Database:
    """Connections to the tables of one run. Safe for threads and processes; open it anew after a fork."""

    def __init__(self, url: str, tables: Tables, namespace: str) -> None:
        try:
            self.url = make_url(url)
            self._engine = _engine(self.url)
        except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
            raise _unusable(url) from None
        self.tables = tables
        self._create(namespace)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one consistent snapshot of the store."""
        with self._translated(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction; writers take turns. Raise `Unchanged` inside to roll back without an error."""
        with self._translated(), self._engine.connect().execution_options(writes=True) as connection:
            try:
                with connection.begin():
                    meta = self.tables.meta
                    connection.execute(update(meta).values(clock=meta.c.clock + 1))
                    yield connection
            except Unchanged:
                return

    def clock(self) -> int:
        """A number that grows with every change of the store."""
        with self.read() as connection:
            return int(connection.execute(select(self.tables.meta.c.clock)).scalar_one())

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """A cheap way to poll the store: a function whose number changes with every commit by others.

        SQLite keeps such a number itself and returns it within microseconds.
        """
        if self.url.get_backend_name() != "sqlite":
            yield self.clock
            return
        with self._translated(), self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            yield lambda: int(driver.execute("PRAGMA data_version").fetchone()[0])

    def flush(self) -> None:
        """Return when everything written so far survives a power cut."""
        if self.url.get_backend_name() != "sqlite":
            return
        with self._translated(), self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute("PRAGMA synchronous=FULL")
            try:
                driver.execute("BEGIN IMMEDIATE")
                driver.execute(f"UPDATE {self.tables.meta.name} SET clock = clock + 1")  # noqa: S608 - our own name
                driver.execute("COMMIT")
            finally:
                driver.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DatabaseError, sqlite3.Error) as error:
            translated = explain(error, self.url)
            if translated is None:
                raise
            raise translated from error

    def _create(self, namespace: str) -> None:
        meta = self.tables.meta
        with self._translated():
            for attempt in range(20):
                try:
                    with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                        if self.url.get_backend_name() == "postgresql":
                            connection.execute(select(func.pg_advisory_xact_lock(7_240_031)))
                        self.tables.metadata.create_all(connection)
                        known = connection.execute(select(meta.c.schema)).scalar()
                        if known is None:
                            first = {"clock": 0, "lineage": 0, "committed": 0, "next_group": 1}
                            connection.execute(
                                insert(meta).values(id=1, namespace=namespace, schema=SCHEMA_VERSION, **first)
                            )
                    break
                except OperationalError as error:
                    # Switching a new file to WAL is refused at once, without the busy timeout, while others open it.
                    if "locked" not in str(error.orig) or attempt == 19:
                        raise
                    time.sleep(0.05 * (attempt + 1))
        if known not in (None, SCHEMA_VERSION):
            raise DataError(
                f"the experience store {self.url.render_as_string()} has schema {known}, this release reads "
                f"{SCHEMA_VERSION}: finish the run with the release it began with, or start a new one"
            )


class Unchanged(Exception):
    """Raised inside `Database.write` to undo the transaction without a fault."""
