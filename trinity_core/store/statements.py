"""The statements of every put and lease: built once, compiled once for the kind of database, run by its driver.

SQLAlchemy takes about ten times as long to build, look up and run a statement as SQLite takes to execute it, and a put
has eight (`benchmarks/store.py`). Rarer statements are written where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ClauseElement, Connection, Integer, Table, bindparam, func, insert, select, update

from trinity_core.store.schema import State, Tables, in_queue


class Statement:
    """One statement with named parameters. Raises errors of the driver, not of SQLAlchemy."""

    def __init__(self, clause: ClauseElement, *keys: str) -> None:
        self._clause = clause
        self._keys = list(keys) or None
        self._compiled: dict[str, tuple[str, dict[str, Any], Sequence[str] | None]] = {}

    def run(self, connection: Connection, **values: Any) -> Any:
        """Execute it inside the transaction of `connection`; the driver's cursor."""
        sql, constants, order = self._for(connection)
        return _cursor(connection).execute(sql, _arguments({**constants, **values}, order))

    def run_many(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute it for each of `rows`."""
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
    """Those of the tables `t`."""

    def __init__(self, t: Tables) -> None:
        m, e, s = t.meta.c, t.explorers.c, t.steps.c
        self.tick = Statement(update(t.meta).values(clock=m.clock + 1))
        """The first of a write transaction, where it takes the write lock."""
        self.numbers = Statement(select(m.lineage, select(func.max(t.groups.c.id)).scalar_subquery()))
        """The present lineage, and the greatest id of a group."""
        self.explorer = Statement(
            select(e.waiting, e.finished, e.begun_rows, s.step, s.version)
            .outerjoin_from(t.explorers, t.steps, s.explorer == e.name)
            .where(e.name == bindparam("key"))
            .order_by(s.step.desc())
            .limit(1)
        )
        """What it waits for, whether it has finished, rows of the step it has begun; its newest step and version."""
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
        """Newest final step; rows and experts of the batch that a step has, if any."""
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


@cache
def statements(t: Tables) -> Statements:
    """The statements of `t`, built once."""
    return Statements(t)
