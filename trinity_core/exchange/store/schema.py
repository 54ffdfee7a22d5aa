"""The store's tables, the same for SQLite and PostgreSQL.

A *group* (the rollouts of one task in one explore step) is the unit of storage: it is put, leased, returned and pruned
as a whole. Ids are assigned under the store's one write lock, so ascending ids give the order of insertion.

The groups are also the ledger: every task drawn has a row, with or without rollouts, that stays after they are deleted.

`Statements` holds the statements of every put and lease: built once, compiled once per kind of database, run by its
driver. SQLAlchemy takes about ten times as long to build, look up and run a statement as SQLite takes to execute it,
and a put has eight (`benchmarks/store.py`). Rarer statements are written where they are used.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ClauseElement,
    Column,
    ColumnElement,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    func,
    insert,
    literal_column,
    select,
    update,
)

SCHEMA_VERSION = 5
META_TABLE = re.compile(r"t[0-9a-f]{10}_meta")
Id = BigInteger().with_variant(Integer, "sqlite")
BY_KEY: dict[str, Any] = {"sqlite_with_rowid": False}
"""Option of tables without an integer key: SQLite then writes one page per row instead of two."""
TRAINER, EXPLORER = "trainer", "explorer"
BOOT = "boot"
"""Role of a row that records a boot of the machine: Unix seconds of the boot, as of the store's first opening after it.
Its name is the boot id."""
IDENTITY = "identity"
"""Role of a row whose name is random, so that stores of the same URL on different machines can be told apart."""
REWIND = "rewind"
"""Role of a row with the step of a rewind; its name is the lineage that began then."""
TURN = "turn"
"""Role of a row for an explorer that waits to begin a step: the step's rows (`total`), and since when (`seen`)."""


class State(IntEnum):
    """The state of a group.

    READY → LEASED (in a trainer step's batch) → TRAINED (a checkpoint contains that step) → PRUNED. Groups of tasks
    without rollouts are DROPPED or FAILED from the start.
    """

    READY = 0
    LEASED = 1
    TRAINED = 2
    STALE = 3
    """Too old for the sampling strategy; counted, never trained on."""
    PRUNED = 4
    """Formerly TRAINED or STALE (then `stale_at` is set); its rows are deleted."""
    DROPPED = 5
    """Operators dropped all its rows."""
    FAILED = 6
    """Its task failed, so it never had rows."""


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of one run; `prefix` separates the runs of a database."""

    metadata: MetaData
    meta: Table
    """One row. In databases without a lock for writers, each writer changes `clock` first; waiting readers poll it."""
    explorers: Table
    """`begun_…`: the explore step in progress, where explorers share a bound on staleness; 0 rows: it waits to
    begin."""
    steps: Table
    """One row for each explore step that was put: the explorer's position after it."""
    groups: Table
    """One row for each task drawn, and for each group that operators added (`task` is null)."""
    experiences: Table
    """The packed rows of each group; separate from `groups`, so that choosing a batch reads little."""
    leases: Table
    """One row for each trainer step that took a batch, including empty batches."""
    lease_groups: Table
    presence: Table
    """One row for each explorer and for the trainer: when it was last seen, its total number of steps, whether it ended
    early, and whether the trainer is about to begin again."""
    lengths: Table


@lru_cache(maxsize=100)
def tables(namespace: str) -> Tables:
    """Return the tables of the run `namespace` (any string), cached with their statements."""
    prefix = "t" + hashlib.sha256(namespace.encode()).hexdigest()[:10] + "_"
    m = MetaData()
    meta = Table(
        prefix + "meta", m, Column("id", Integer, primary_key=True, autoincrement=False),
        Column("namespace", Text), Column("schema", Integer), Column("clock", Id), Column("lineage", Integer),
        Column("committed", Integer),
    )  # fmt: skip
    explorers = Table(
        prefix + "explorers", m, Column("name", String(200), primary_key=True), Column("waiting", Integer),
        Column("finished", Boolean, nullable=False, default=False), Column("begun_rows", Integer),
        Column("begun_version", Integer), **BY_KEY,
    )  # fmt: skip
    """`begun_rows`: rows of the step that the explorer has begun; 0: it waits to begin one; null: without
    `max_staleness`."""
    steps = Table(
        prefix + "steps", m, Column("explorer", String(200), primary_key=True),
        Column("step", Integer, primary_key=True, autoincrement=False), Column("version", Integer, nullable=False),
        Column("position", Text, nullable=False), Column("rows", Integer, nullable=False),
        Column("tasks", Integer, nullable=False), **BY_KEY,
    )  # fmt: skip
    groups = Table(
        prefix + "groups", m, Column("id", Id, primary_key=True, autoincrement=False),
        Column("explorer", String(200), nullable=False), Column("step", Integer, nullable=False),
        Column("name", Text, nullable=False), Column("size", Integer, nullable=False),
        Column("newest", Integer, nullable=False), Column("oldest", Integer, nullable=False),
        Column("state", Integer, nullable=False), Column("stale_at", Integer), Column("task", Text),
        Column("produced", Integer, nullable=False), Column("tries", Integer, nullable=False),
        Column("dropped", Text), Column("failure", Text),
    )  # fmt: skip
    queue: dict[str, Any] = {f"{database}_where": in_queue(groups) for database in ("sqlite", "postgresql")}
    Index(prefix + "groups_ready", groups.c.state, groups.c.id, **queue)
    experiences = Table(
        prefix + "experiences", m, Column("group_id", Id, primary_key=True, autoincrement=False),
        Column("blob", LargeBinary, nullable=False),
    )  # fmt: skip
    leases = Table(
        prefix + "leases", m, Column("step", Integer, primary_key=True, autoincrement=False),
        Column("rows", Integer, nullable=False), Column("at", Double, nullable=False), Column("expert", Text),
        Column("reuse", Boolean, nullable=False),
    )  # fmt: skip
    lease_groups = Table(
        prefix + "lease_groups", m, Column("step", Integer, primary_key=True, autoincrement=False),
        Column("ordinal", Integer, primary_key=True, autoincrement=False), Column("group_id", Id, nullable=False),
        **BY_KEY,
    )  # fmt: skip
    presence = Table(
        prefix + "presence", m, Column("role", String(20), primary_key=True),
        Column("name", String(200), primary_key=True), Column("seen", Double), Column("total", Integer),
        Column("has_left", Boolean, key="left", nullable=False, default=False),
        Column("expected", Boolean, nullable=False, default=False), **BY_KEY,
    )  # fmt: skip
    lengths = Table(
        prefix + "lengths", m, Column("explorer", String(200), primary_key=True), Column("agreed", Integer),
        Column("announced", Integer), Column("is_behind", Boolean, nullable=False, default=False), **BY_KEY,
    )  # fmt: skip
    return Tables(m, meta, explorers, steps, groups, experiences, leases, lease_groups, presence, lengths)


def in_queue(groups: Table) -> ColumnElement[bool]:
    """Select the groups in the queue. The state is a literal, so that the database can use the partial index."""
    return groups.c.state == literal_column(str(int(State.READY)))


def kept(t: Tables) -> ColumnElement[bool]:
    """Select the groups from the oldest one with stored rows on, which bounds queries in a long run."""
    return t.groups.c.id >= select(func.min(t.experiences.c.group_id)).scalar_subquery()


class Statement:
    """A statement with named parameters. Raises errors of the driver, not of SQLAlchemy."""

    def __init__(self, clause: ClauseElement, *keys: str) -> None:
        self._clause = clause
        self._keys = list(keys) or None
        self._compiled: dict[str, tuple[str, dict[str, Any], Sequence[str] | None]] = {}

    def run(self, connection: Connection, **values: Any) -> Any:
        """Execute it within the transaction of `connection` and return the driver's cursor."""
        sql, constants, order = self._for(connection)
        return _cursor(connection).execute(sql, _arguments({**constants, **values}, order))

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        sql, constants, order = self._for(connection)
        _cursor(connection).executemany(sql, [_arguments({**constants, **row}, order) for row in rows])

    def _for(self, connection: Connection) -> tuple[str, dict[str, Any], Sequence[str] | None]:
        dialect = connection.dialect
        if dialect.name not in self._compiled:
            compiled: Any = self._clause.compile(dialect=dialect, column_keys=self._keys)
            constants = {name: value for name, value in compiled.params.items() if value is not None}
            self._compiled[dialect.name] = (str(compiled), constants, compiled.positiontup)
        return self._compiled[dialect.name]


def _cursor(connection: Connection) -> Any:
    driver: Any = connection.connection.driver_connection
    return driver.cursor()


def _arguments(values: dict[str, Any], order: Sequence[str] | None) -> Any:
    return values if order is None else [values[name] for name in order]


def _insert(table: Table) -> Statement:
    return Statement(insert(table), *(column.key for column in table.c))


class Statements:
    def __init__(self, t: Tables) -> None:
        m, e, s = t.meta.c, t.explorers.c, t.steps.c
        self.tick = Statement(update(t.meta).values(clock=m.clock + 1))
        """First statement of a write transaction, where it takes the write lock."""
        self.numbers = Statement(select(m.lineage, select(func.max(t.groups.c.id)).scalar_subquery()))
        """The current lineage, and the greatest group id."""
        self.explorer = Statement(
            select(e.waiting, e.finished, e.begun_rows, s.step, s.version)
            .outerjoin_from(t.explorers, t.steps, s.explorer == e.name)
            .where(e.name == bindparam("key"))
            .order_by(s.step.desc())
            .limit(1)
        )
        """The version it waits for, whether it has finished, rows of the step it has begun; its newest step and
        version."""
        self.add_step = _insert(t.steps)
        self.add_groups = _insert(t.groups)
        self.add_experiences = _insert(t.experiences)
        self.set_explorer = Statement(
            update(t.explorers).where(t.explorers.c.name == bindparam("key")),
            "waiting", "finished", "begun_rows", "begun_version",
        )  # fmt: skip
        g, lg = t.groups.c, t.lease_groups.c
        self.lease = Statement(
            select(m.committed, t.leases.c.rows, t.leases.c.expert).outerjoin_from(
                t.meta, t.leases, t.leases.c.step == bindparam("key")
            )
        )
        """The newest final step; rows and experts of a step's batch, if any."""
        self.oldest_ready = Statement(
            select(g.id, g.size, g.newest, g.oldest, g.explorer, g.step)
            .where(in_queue(t.groups))
            .order_by(g.id)
            .limit(bindparam("count", type_=Integer))
        )
        self.add_lease = _insert(t.leases)
        self.add_lease_groups = _insert(t.lease_groups)
        self.mark_leased = Statement(update(t.groups).where(g.id == bindparam("key")).values(state=int(State.LEASED)))
        self.leased = Statement(
            select(lg.group_id, g.name, t.experiences.c.blob)
            .join(t.groups, g.id == lg.group_id)
            .join(t.experiences, t.experiences.c.group_id == lg.group_id)
            .where(lg.step == bindparam("key"))
            .order_by(lg.ordinal)
        )


@lru_cache(maxsize=100)
def statements(t: Tables) -> Statements:
    return Statements(t)
