"""The experience database: opening it, serialising writers, and explaining errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast
from uuid import uuid4

from sqlalchemy import URL, Connection, Engine, column, insert, inspect, make_url, select, table
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    NoSuchModuleError,
    OperationalError,
)

from trinity_core.base.errors import DataError, TransientFault, TrinityError, on_failure
from trinity_core.base.files import when_room
from trinity_core.base.processes import BOOT_ID
from trinity_core.base.waits import retry
from trinity_core.config.paths import DATABASES
from trinity_core.config.secrets import without_password
from trinity_core.exchange.store.backend import StoreBackend, backend_of
from trinity_core.exchange.store.schema import BOOT, IDENTITY, META_TABLE, SCHEMA_VERSION, Tables, statements

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)
CREATE_SECONDS = 10.0
"""Time limit when several processes open a new store at once."""
SQLITE_FILE = "sqlite:///"


class StoreAway(TransientFault):
    """The database server does not answer, or was lost during a transaction."""


def _unusable(url: str) -> TrinityError:
    """Return the error for a bad URL, without its cause, which may contain the password."""
    return TrinityError(
        f"experience_buffer.path {without_password(url)!r} is no database that can be used: write "
        "postgresql://user:password@host/database, or sqlite:///name.db for a file",
        key="buffer.trainer_input.experience_buffer.path",
    )


def parsed_url(url: str) -> URL:
    """Like `make_url`, but a `?` in the folder of a SQLite file belongs to its name: run folders may contain one."""
    folder, slash, name = url.removeprefix(SQLITE_FILE).rpartition("/")
    if not url.startswith(SQLITE_FILE) or "?" not in folder:
        return make_url(url)
    parsed = make_url(SQLITE_FILE + name)
    return parsed.set(database=f"{folder}{slash}{parsed.database or ''}")


def fault_of(url: str) -> str:
    """Return why the database at `url` must not be used, phrased to follow its key in a sentence, or ""."""
    parsed = parsed_url(url)
    backend = backend_of(parsed)
    return backend.fault(parsed) if backend else ""


def is_of_one_machine(url: str) -> bool:
    """True if the database at `url` can be used from one machine only."""
    backend = backend_of(parsed_url(url))
    return backend is not None and backend.one_machine


def explain(error: Exception, url: URL, advice: Mapping[str, str]) -> Exception | None:
    """Translate an error of SQLAlchemy or a driver for users; None if it is a bug of ours.

    All drivers' error classes have the names given by PEP 249, or derive from such a class.
    """
    text = str(error.orig if isinstance(error, DatabaseError) else error)
    where = url.render_as_string(hide_password=True)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"IntegrityError", "ProgrammingError"}:
        return None
    if "locked" in text or "lock timeout" in text:
        return TransientFault(f"the experience store {where} was locked for too long: {text}")
    if "idle-in-transaction" in text:
        return StoreAway(
            f"the experience store {where} ended a transaction that stood still (this process was stopped, or the "
            f"network cut): {text}"
        )
    for sign, remedy in advice.items():
        if sign in text:
            return TrinityError(f"the experience store {where} cannot be used ({text}): {remedy}")
    if "malformed" in text or "not a database" in text:
        return DataError(f"the experience store {where} is damaged ({text}): restore it, or move it away to start over")
    if "OperationalError" in kinds:
        return StoreAway(f"the experience store {where} does not answer: {text.strip()}")
    return None


def _connect(url: str, read_only: bool) -> tuple[URL, StoreBackend, Engine]:
    try:
        parsed = parsed_url(url)
        backend = backend_of(parsed)
        if backend is None:
            raise _unusable(parsed.render_as_string(hide_password=True))
        return parsed, backend, backend.connect_read_only(parsed) if read_only else backend.connect(parsed)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError):
        raise _unusable(url) from None


def namespaces(url: str) -> list[str]:
    """Return the runs that have stores in a database, without changing it."""
    parsed, backend, engine = _connect(url, read_only=True)
    errors: tuple[type[Exception], ...] = (DatabaseError, *backend.driver_errors)
    try:
        with engine.connect() as connection, connection.begin():
            backend.begin(connection)
            names = [name for name in inspect(connection).get_table_names() if META_TABLE.fullmatch(name)]
            return sorted(
                connection.execute(select(column("namespace")).select_from(table(n))).scalar() or "" for n in names
            )
    except errors as error:
        translated = explain(error, parsed, backend.advice)
        if translated is None:
            raise
        raise translated from error
    finally:
        engine.dispose()


def databases_in(folder: Path) -> list[Path]:
    """Return the SQLite files in a run's `buffer` folder: its store, or task queues."""
    return [file for file in sorted(folder.glob("*")) if file.suffix in DATABASES]


def stores_in(folder: Path) -> list[Path]:
    """Return those of `databases_in` that hold a store. Each is opened, which takes 15 ms."""
    return [file for file in databases_in(folder) if namespaces(f"{SQLITE_FILE}{file.absolute()}")]


def again_if_away(method: F) -> F:
    """Decorate a method that runs one transaction: it is called once more if the server is lost meanwhile.

    A new connection waits for the server to come back. The method must be safe to repeat: the first call may have
    succeeded without a reply.
    """

    @wraps(method)
    def call(*positional: Any, **options: Any) -> Any:
        try:
            return method(*positional, **options)
        except StoreAway as away:
            log.warning("%s; the statement is repeated once", away)
            return method(*positional, **options)

    return cast(F, call)


class Database:
    """Connections to the tables of one run. Safe for threads and processes; reopen it after a fork."""

    def __init__(
        self, url: str, tables: Tables, namespace: str, read_only: bool = False, patience: float | None = None
    ) -> None:
        self.url, self._backend, self._engine = _connect(url, read_only)
        self._backend.patience = patience
        self._snapshots = self._engine.execution_options(**self._backend.snapshot)
        self._errors: tuple[type[Exception], ...] = (DatabaseError, *self._backend.driver_errors)
        self.tables = tables
        self._tick = statements(tables).tick.run
        self._idle: list[Connection] = []
        """Writers' connections, kept open: checking one out of the pool takes as long as the statements of a put."""
        self._booted: float | None = None
        """Boot time of this machine as recorded in the store (`BOOT`)."""
        if read_only:
            with self.read() as connection:
                self._check_schema(connection.execute(select(tables.meta.c.schema)).scalar())
                self._booted = self._boot_time(connection)
        else:
            self._create(namespace)

    @property
    def name(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction: one consistent snapshot of the store."""
        with self._translated(), self._snapshots.connect() as connection, connection.begin():
            self._backend.begin(connection)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a write transaction; writers take turns. Raise `Unchanged` inside to roll back without an error."""
        with suppress(Unchanged), self._translated():
            connection = self._connection()
            with on_failure(connection.close):  # close() rolls back
                self._backend.begin_writing(connection, self._tick)
                yield connection
                connection.commit()  # ends the transaction that SQLAlchemy began, if a statement went through it
                connection.connection.commit()
            self._give_back(connection)

    def _connection(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._engine.connect()

    def _give_back(self, connection: Connection) -> None:
        if self._backend.connections_last:
            self._idle.append(connection)
        else:
            connection.close()

    @again_if_away
    def clock(self) -> int:
        """Return a number that grows with every change of a store on a server; changes of a SQLite file are seen by
        `watching`."""
        with self.read() as connection:
            return int(connection.execute(select(self.tables.meta.c.clock)).scalar_one())

    def now(self, connection: Connection) -> float:
        """Return Unix seconds of the store's clock, which dates everything in the store.

        If all processes are on one machine, this clock is monotonic: a clock adjustment or a suspended machine would
        otherwise make active members look lost.
        """
        return self._backend.now(connection) if self._booted is None else self._booted + time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[Callable[[], int]]:
        """Yield a function whose number changes with every commit by others: a cheap way to poll the store."""
        with self._translated(), self._backend.watch(self._engine, self.clock) as changes:
            yield changes

    def flush(self) -> None:
        """Return when everything written so far survives a power cut."""
        with self._translated():
            self._backend.flush(self._engine, self.tables.meta)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            translated = explain(error, self.url, self._backend.advice)
            if translated is None:
                raise
            raise translated from self._backend.no_room(self.url, error) or error

    def _create(self, namespace: str) -> None:
        meta = self.tables.meta

        def create() -> None:
            with self._engine.connect() as connection, connection.begin():
                if inspect(connection).has_table(meta.name):  # leave another release's store unchanged
                    self._check_schema(connection.execute(select(meta.c.schema)).scalar())
                self._backend.lock_schema(connection)
                self.tables.metadata.create_all(connection)
                if connection.execute(select(meta.c.schema)).scalar() is None:
                    first = {"clock": 0, "lineage": 0, "committed": 0}
                    connection.execute(insert(meta).values(id=1, namespace=namespace, schema=SCHEMA_VERSION, **first))
                presence = self.tables.presence
                if self._identity(connection) is None:
                    connection.execute(insert(presence).values(role=IDENTITY, name=uuid4().hex))
                if self._backend.one_machine and BOOT_ID.exists():
                    self._booted = self._boot_time(connection)
                    if self._booted is None:
                        self._booted = time.time() - time.monotonic()
                        boot = {"role": BOOT, "name": BOOT_ID.read_text().strip(), "seen": self._booted}
                        connection.execute(insert(presence).values(boot))

        with self._translated():
            when_room(partial(retry, create, _is_locked, CREATE_SECONDS, 0.1), self.name)

    @property
    def identity(self) -> str:
        """Return the name of the run's `IDENTITY` row."""
        with self.read() as connection:
            return self._identity(connection) or ""

    def _identity(self, connection: Connection) -> str | None:
        p = self.tables.presence.c
        return connection.scalar(select(p.name).where(p.role == IDENTITY))

    def _boot_time(self, connection: Connection) -> float | None:
        p, boot = self.tables.presence.c, BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        return connection.scalar(select(p.seen).where(p.role == BOOT, p.name == boot))

    def _check_schema(self, version: int | None) -> None:
        if version != SCHEMA_VERSION:
            raise DataError(
                f"the experience store {self.name} has schema {version}, this release reads "
                f"{SCHEMA_VERSION}: finish the run with the release it began with (monitor/run.json names it), or "
                "start a new one"
            )


class Unchanged(Exception):
    """Raised inside `Database.write` to roll back without an error."""


def waits_for_room(method: F) -> F:
    """Decorate a method of a store with a `_database`: repeat it while that database's disk is full, and as
    `again_if_away` does."""
    method = again_if_away(method)

    @wraps(method)
    def call(store: Any, *positional: Any, **options: Any) -> Any:
        return when_room(partial(method, store, *positional, **options), store._database.name)

    return cast(F, call)


def _is_locked(error: Exception) -> bool:
    """True if a new SQLite file is locked: switching to WAL fails at once, without the busy timeout, while others open
    it."""
    return isinstance(error, OperationalError) and "locked" in str(error.orig)
