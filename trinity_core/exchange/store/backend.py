"""The differences between databases beyond SQL."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, ClassVar

from sqlalchemy import URL, Connection, Engine, Table

from trinity_core.config.paths import STORE_BACKENDS

BUSY_TIMEOUT = 60.0
"""Seconds that a writer waits for others. A transaction takes milliseconds, so a wait this long means something
hangs."""


class StoreBackend(ABC):
    """One kind of database. The defaults suit a server whose transactions are durable when they commit."""

    driver_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """The driver's own errors, which reach the store where it calls the driver without SQLAlchemy."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Text of an error that no retry can fix → advice for the user."""

    one_machine: ClassVar[bool] = False
    """True if all processes of a run must be on one machine."""
    connections_last: ClassVar[bool] = False
    """True if only this process closes connections, so that they need no test before each use."""
    patience: float | None = None
    """Seconds that a writer waits for one that holds a lock which the database itself never takes away; None:
    `BUSY_TIMEOUT`."""
    snapshot: ClassVar[Mapping[str, Any]] = {}
    """Execution options for a read transaction that sees one consistent snapshot despite concurrent commits."""

    @abstractmethod
    def connect(self, url: URL) -> Engine:
        """Connections to the database."""

    def begin(self, connection: Connection) -> None:  # noqa: B027 - most need nothing
        """Called first in each read-only transaction."""

    def begin_writing(self, connection: Connection, tick: Callable[[Connection], object]) -> None:
        """Called first in each write transaction; returns when no other writer is active.

        `tick` increments a counter in the store's `meta` row and thereby locks that row.
        """
        tick(connection)

    def fault(self, url: URL) -> str:
        """Return why the database at `url` must not be used, phrased to follow its key in a sentence, or ""."""
        return ""

    def no_room(self, url: URL, error: Exception) -> OSError | None:
        """Return the file system's error if `error` is due to a full disk or quota but does not say so."""
        return None

    @abstractmethod
    def connect_read_only(self, url: URL) -> Engine:
        """Connect to an existing database without permission to change it."""

    def now(self, connection: Connection) -> float:
        """Return Unix seconds of the clock shared by all processes of a run; for a database file, the machine's
        clock."""
        return time.time()

    def lock_schema(self, connection: Connection) -> None:  # noqa: B027 - most need nothing
        """Called first in the transaction that creates the tables; locks out other creators."""

    @contextmanager
    def watch(self, engine: Engine, clock: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """Yield a function whose number changes with every change of the store by others, cheap enough to call often.

        `clock` reads the store's own counter, which takes a transaction.
        """
        yield clock

    def flush(self, engine: Engine, meta: Table) -> None:  # noqa: B027 - most need nothing
        """Return when everything committed so far survives a power cut."""


def backend_of(url: URL) -> StoreBackend | None:
    """Return the backend for a URL; None if its scheme is unknown."""
    name = STORE_BACKENDS.get(url.get_backend_name())
    backend: StoreBackend | None = resolve_name(name)() if name else None
    return backend
