"""SQLite as the store's database: a file on one node.

A power cut may lose SQLite's last transactions (WAL, `synchronous=NORMAL`), newest first and each as a whole, but never
corrupts the database. The system relies on that: rows and the explorer's position are lost together and sampled again,
and `flush` runs before a checkpoint is named, so that no checkpoint outlives the record of its training data. A killed
process loses nothing that was committed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import ClassVar
from urllib.parse import quote

import psutil
from sqlalchemy import URL, Connection, Engine, Table, create_engine, event

from trinity_core.base.addresses import in_words
from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import clear_errors, is_full, networked, private_file, private_folder
from trinity_core.base.waits import Reminder, poll
from trinity_core.exchange.store.backend import BUSY_TIMEOUT, StoreBackend

log = logging.getLogger(__name__)

PATH_KEY = "buffer.trainer_input.experience_buffer.path"
LOOK_SECONDS = 10.0
"""Time that SQLite itself waits for a lock; then the holder is named, and the wait continues."""
WRITE_LOCK = 120
"""The byte of the shared-memory index that a writer locks (sqlite.org/walformat.html)."""
PROBE_BYTES = 1 << 16
"""More than SQLite writes at once."""


class SQLite(StoreBackend):
    """A SQLite file in WAL mode."""

    driver_errors = (sqlite3.Error,)
    connections_last = True
    one_machine = True
    advice: ClassVar = {
        "disk is full": "free some space",
        "unable to open": "its folder must exist and be writable",
        "readonly": "make the file and its folder writable",
        "disk I/O": "look at the disk, its free space and your quota",
    }

    def connect(self, url: URL) -> Engine:
        """Create the file's folder if needed. Raises TrinityError for an in-memory database or one with a `fault`."""
        if not url.database or url.database == ":memory:":
            raise TrinityError(
                "the experience store must outlive its process: give a file, not an in-memory database",
                key=PATH_KEY,
            )
        if fault := self.fault(url):
            raise TrinityError(f"{PATH_KEY} {fault}", key=PATH_KEY)
        with clear_errors("making", Path(url.database).parent):
            private_folder(Path(url.database).parent)
            private_file(Path(url.database))
        timeout = min(BUSY_TIMEOUT, LOOK_SECONDS)
        engine = create_engine(url, connect_args={"timeout": timeout, "isolation_level": None})

        @event.listens_for(engine, "connect")
        def _(connection, record) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA cache_size=-65536")

        return engine

    def begin(self, connection: Connection) -> None:
        _driver(connection).execute("BEGIN")

    def begin_writing(self, connection: Connection, tick: Callable[[Connection], object]) -> None:
        """SQLite has a lock for writers, and counts changes itself (`watch`)."""
        self._begin_immediate(connection)  # a reader that becomes a writer may be refused at once

    def lock_schema(self, connection: Connection) -> None:
        self._begin_immediate(connection)

    def _begin_immediate(self, connection: Connection) -> None:
        """Become the only writer. A process that was stopped within its transaction keeps others from it."""
        limit, reminder = BUSY_TIMEOUT if self.patience is None else self.patience, Reminder()
        for elapsed in poll(limit):
            try:
                _driver(connection).execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                path = Path(connection.engine.url.database or "")
                holder = lock_holder(path)
            if reminder.due(elapsed + LOOK_SECONDS):
                log.warning("waits up to %g s for the experience store %s, which %s has locked", limit, path, holder)
        raise sqlite3.OperationalError(f"database is locked, for {limit:g} s, by {holder}")

    def fault(self, url: URL) -> str:
        """On a network file system, each machine would have its own copy of WAL's shared-memory index."""
        kind = networked(Path(url.database or ""))
        if not kind:
            return ""
        return (
            f"is a SQLite file on a network file system ({kind}: {url.database}), where SQLite may lose data. "
            "Write postgresql://user:password@host/database, or, if the whole run is on this machine, "
            "sqlite:////folder/name.db on a local disk."
        )

    def no_room(self, url: URL, error: Exception) -> OSError | None:
        """For an exhausted quota, SQLite only reports that a write failed."""
        if "disk I/O" not in str(error):
            return None
        try:
            with TemporaryFile(dir=Path(url.database or "").absolute().parent) as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as refusal:
            return refusal if is_full(refusal) else None
        return None

    def connect_read_only(self, url: URL) -> Engine:
        path = Path(url.database or "").absolute()
        if not path.is_file():
            raise DataError(f"there is no experience store {path}")
        options = {"mode": "ro", "uri": "true"}
        if not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
            options["immutable"] = "1"  # otherwise SQLite creates the write-ahead log's files even to read
        read_only = url.set(drivername="sqlite", database=f"file:{quote(str(path))}", query=options)
        return create_engine(read_only, connect_args={"timeout": BUSY_TIMEOUT, "isolation_level": None})

    @contextmanager
    def watch(self, engine: Engine, clock: Callable[[], int]) -> Iterator[Callable[[], int]]:
        """SQLite keeps such a number itself and returns it within microseconds."""
        with engine.connect() as connection:
            driver = _driver(connection)
            yield lambda: int(driver.execute("PRAGMA data_version").fetchone()[0])

    def flush(self, engine: Engine, meta: Table) -> None:
        """One commit with `synchronous=FULL` syncs all earlier commits."""
        with engine.connect() as connection:
            driver = _driver(connection)
            driver.execute("PRAGMA synchronous=FULL")
            try:
                self._begin_immediate(connection)
                driver.execute(f"UPDATE {meta.name} SET clock = clock + 1")  # noqa: S608 - our own name
                driver.execute("COMMIT")
            finally:
                driver.execute("PRAGMA synchronous=NORMAL")


def lock_holder(path: Path) -> str:
    """Name the process that writes to a SQLite file in WAL mode, and say so if it is stopped."""
    try:
        inode = Path(f"{path}-shm").stat().st_ino
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
    except OSError:
        return in_words(None)
    for _, kind, _, access, pid, file, first, last in locks:
        is_ours = (kind, access) == ("POSIX", "WRITE") and file.endswith(f":{inode}") and int(pid) > 0
        if is_ours and int(first) <= WRITE_LOCK and (last == "EOF" or int(last) >= WRITE_LOCK):
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                stopped = process.status() == psutil.STATUS_STOPPED
                return in_words(process) + (f", which is stopped (`kill -CONT {pid}` continues it)," if stopped else "")
    return in_words(None)


def _driver(connection: Connection) -> sqlite3.Connection:
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver
