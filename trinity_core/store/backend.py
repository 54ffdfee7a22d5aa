"""What differs between kinds of database beyond SQL."""

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
"""Seconds that a writer waits for the others; a transaction takes milliseconds, so this long means something hangs."""


class StoreBackend(ABC):
    """One kind of database. The defaults suit a server with transactions that are durable when they commit."""

    driver_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of the driver itself, which reach the store when it calls the driver without SQLAlchemy."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Text in an error of this database that no retry can fix → what the user has to do."""

    one_machine: ClassVar[bool] = False
    """True if all processes of a run must be on one machine."""
    connections_last: ClassVar[bool] = False
    """True if only this process ends a connection, which then need not be tried before each use."""
    snapshot: ClassVar[Mapping[str, Any]] = {}
    """Execution options of a connection whose read transaction sees one moment, whatever others commit meanwhile."""

    @abstractmethod
    def connect(self, url: URL) -> Engine:
        """Connections to the database."""

    def begin(self, connection: Connection) -> None:  # noqa: B027 - most need nothing
        """Called first in each transaction that only reads."""

    def begin_writing(self, connection: Connection, tick: Callable[[Connection], object]) -> None:
        """Called first in each transaction that writes; returns when no other one does.

        `tick` counts a change in the store's `meta` row, and thereby locks that row.
        """
        tick(connection)

    def fault(self, url: URL) -> str:
        """Why the database at `url` must not be used, to follow its key in a sentence; empty if nothing is known."""
        return ""

    def no_room(self, url: URL, error: Exception) -> OSError | None:
        """What the file system says where `error` comes of a full disk or quota and does not say so itself."""
        return None

    @abstractmethod
    def connect_read_only(self, url: URL) -> Engine:
        """Connections to an existing database that can change nothing in it."""

    def now(self, connection: Connection) -> float:
        """Unix seconds by the clock that all processes of a run share: where the database is a file, its machine's."""
        return time.time()

    def lock_schema(self, connection: Connection) -> None:  # noqa: B027 - most need nothing
        """Called first in the transaction that creates the tables: keeps others from doing so at the same time."""

    @contextmanager
    def watch(self, engine: Engine, clock: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """A number that changes with every change of the store by others, cheap enough to read often.

        `clock` reads the store's own counter, which takes a transaction.
        """
        yield clock

    def flush(self, engine: Engine, meta: Table) -> None:  # noqa: B027 - most need nothing
        """Return when everything committed so far survives a power cut."""


def backend_of(url: URL) -> StoreBackend | None:
    """The backend for a URL; None if there is none for its scheme."""
    name = STORE_BACKENDS.get(url.get_backend_name())
    backend: StoreBackend | None = resolve_name(name)() if name else None
    return backend
