"""PostgreSQL as the store's database: for several nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, select

from trinity_core.base.waits import retry
from trinity_core.exchange.store import backend
from trinity_core.exchange.store.backend import StoreBackend

log = logging.getLogger(__name__)

LIMITS = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}  # fmt: skip
"""libpq time limits in seconds, the last in milliseconds: a lost machine is noticed after a minute, not after hours."""
AWAY_SECONDS = 120.0
"""Time for a server that has answered before to answer again, for example after a restart. A server that never answered
may have a wrong address."""
_answered: set[str] = set()
"""URLs, without passwords, of servers that have answered this process."""
SCHEMA_LOCK = 7_240_031


class PostgreSQL(StoreBackend):
    """A PostgreSQL server. Its commits are durable, and writers wait for one another on the `meta` row.

    A writer that is stopped or cut off during a transaction holds that row. The server ends its transaction before the
    others have waited for `BUSY_TIMEOUT`.
    """

    driver_errors = (psycopg.Error,)
    advice: ClassVar = {
        "authentication failed": "look at user and password in its URL",
        "does not exist": "create the database or correct its name in the URL",
    }

    snapshot: ClassVar = {"isolation_level": "REPEATABLE READ"}

    def connect(self, url: URL) -> Engine:
        """A URL without a driver uses psycopg."""
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        limits = LIMITS if "psycopg" in url.get_driver_name() else {}
        engine = create_engine(url, pool_pre_ping=True, connect_args=limits)
        waits, idle = int(1000 * backend.BUSY_TIMEOUT), int(500 * backend.BUSY_TIMEOUT)

        @event.listens_for(engine, "do_connect")
        def _(dialect: Any, _record: Any, positional: Any, options: Any) -> Any:
            return _connected(lambda: dialect.connect(*positional, **options), url)

        @event.listens_for(engine, "connect")
        def _(connection: Any, _record: Any) -> None:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(f"SET lock_timeout = {waits}; SET idle_in_transaction_session_timeout = {idle}")
            connection.autocommit = False

        return engine

    def connect_read_only(self, url: URL) -> Engine:
        return self.connect(url).execution_options(postgresql_readonly=True)

    def now(self, connection: Connection) -> float:
        """Return the server's clock, since those of the machines may differ by more than `LOST_SECONDS`."""
        return float(connection.execute(select(func.extract("epoch", func.clock_timestamp()))).scalar_one())

    def lock_schema(self, connection: Connection) -> None:
        """Take an advisory lock: concurrent `CREATE TABLE IF NOT EXISTS` can fail."""
        connection.execute(select(func.pg_advisory_xact_lock(SCHEMA_LOCK)))


def _connected(connect: Callable[[], Any], url: URL) -> Any:
    """Call `connect`, repeatedly if the server at `url` has answered before."""
    where = url.render_as_string(hide_password=True)

    def is_away(error: Exception) -> bool:
        refused = any(sign in str(error) for sign in PostgreSQL.advice)
        return isinstance(error, psycopg.OperationalError) and not refused and where in _answered

    connection = retry(connect, is_away, AWAY_SECONDS, pause=1.0, notice=f"{where} does not answer")
    _answered.add(where)
    return connection
