"""What is on its way to the trainer, and from whom more may come: facts about explorers, inside one transaction."""

from __future__ import annotations

from sqlalchemy import Connection, and_, func, select

from trinity_core.store.presence import LOST_SECONDS
from trinity_core.store.schema import EXPLORER, Tables, in_queue


def on_their_way(
    connection: Connection, t: Tables, explorer: str, now: float
) -> tuple[int, int, list[tuple[int, int]]]:
    """Newest train step with a batch, rows ready, and (rows, version) of the steps that other explorers have begun."""
    committed = connection.execute(select(t.meta.c.committed)).scalar_one()
    leased = connection.execute(select(func.max(t.leases.c.step))).scalar() or 0
    ready = connection.execute(select(func.sum(t.groups.c.size)).where(in_queue(t.groups))).scalar() or 0
    e = t.explorers.c
    begun = select(e.name, e.begun_rows, e.begun_version).where(e.begun_rows > 0, e.name != explorer)
    lost = lost_explorers(connection, t, now)
    others = [(row[1], row[2]) for row in connection.execute(begun) if row[0] not in lost]
    return max(leased, committed), int(ready), others


def recorded_wait(connection: Connection, t: Tables, explorer: str) -> int | None:
    """The version that `explorer` waits for by the record; None if it does not wait."""
    return connection.execute(select(t.explorers.c.waiting).where(t.explorers.c.name == explorer)).scalar()


def nothing_more_comes(connection: Connection, t: Tables, newest_version: int, now: float) -> bool:
    """True if every explorer has finished or waits for weights that need a further train step.

    Lost explorers are left out where another one waits so: they may come back, but not before it goes on. Those that
    have left are not waited for at all, unless all have.
    """
    e, p = t.explorers.c, t.presence.c
    left = select(p.name).where(p.role == EXPLORER, p.left)
    states = connection.execute(select(e.name, e.waiting, e.finished).where(e.name.not_in(left))).all()
    lost = lost_explorers(connection, t, now)
    waits = {row.name for row in states if row.waiting is not None and row.waiting > newest_version}
    left_out = lost if waits - lost else set()
    return bool(states) and all(row.finished or row.name in waits | left_out for row in states)


def lost_explorers(connection: Connection, t: Tables, now: float) -> set[str]:
    """Explorers that have been seen, but not of late."""
    p = t.presence.c
    return set(connection.scalars(select(p.name).where(and_(p.role == EXPLORER, p.seen <= now - LOST_SECONDS))))
