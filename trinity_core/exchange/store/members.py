"""The members of a run in the store's tables, read and written within a transaction. Rules are in `presence.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, and_, case, delete, func, insert, select, update

from trinity_core.exchange.store.presence import ExplorerPresence, Length, TrainerPresence, Turn
from trinity_core.exchange.store.schema import EXPLORER, TRAINER, TURN, State, Tables, in_queue, kept


def note(connection: Connection, t: Tables, role: str, name: str, **values: Any) -> None:
    p = t.presence
    mine = and_(p.c.role == role, p.c.name == name)
    if not connection.execute(update(p).where(mine).values(**values)).rowcount:
        connection.execute(insert(p).values(role=role, name=name, **values))


def trainer_state(connection: Connection, t: Tables) -> TrainerPresence:
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    p = t.presence.c
    row = connection.execute(
        select(p.total, p.seen, p.expected, p.left).where(p.role == TRAINER).order_by(p.seen.desc()).limit(1)
    ).one_or_none()
    return TrainerPresence(meta.lineage, meta.committed, *(row or ()))


def turns(connection: Connection, t: Tables) -> dict[str, Turn]:
    """Return explorer → the step that it waits, or last waited, to begin."""
    p = t.presence.c
    return {
        name: Turn(seen, total)
        for name, seen, total in connection.execute(select(p.name, p.seen, p.total).where(p.role == TURN))
    }


def end_turn(connection: Connection, t: Tables, name: str) -> None:
    connection.execute(delete(t.presence).where(t.presence.c.role == TURN, t.presence.c.name == name))


def begin_trainer(connection: Connection, t: Tables, name: str, total: int, now: float) -> None:
    """Record that a trainer of `total` steps begins. Explorers that are now behind it count as unfinished."""
    earlier_total = trainer_state(connection, t).total
    note(connection, t, TRAINER, name, total=total, seen=now, expected=False, left=False)
    has_more, at_work = earlier_total is not None and earlier_total < total, not trainer_state(connection, t).finished
    for explorer in connection.scalars(select(t.explorers.c.name)).all():
        length = _length(connection, t, explorer).trainer_begins(has_more, at_work)
        _set_length(connection, t, explorer, length)
        if has_more and length.is_behind:
            connection.execute(update(t.explorers).where(t.explorers.c.name == explorer).values(finished=False))


def join_explorer(
    connection: Connection, t: Tables, name: str, total: int | None, length: int | None, now: float
) -> bool:
    """Record that an explorer of `total` steps (None: it ends with the trainer) begins, in a run of that `length`.

    Return True if its rollouts would not be trained on: the trainer has finished, and this run is no longer than it was
    while the trainer was active.
    """
    at_work = not trainer_state(connection, t).finished
    lengths, outlasts = _length(connection, t, name), False
    if length is not None:
        outlasts = lengths.outlasts(length)
        _set_length(connection, t, name, lengths.explorer_begins(length, at_work))
    note(connection, t, EXPLORER, name, seen=now, left=False, total=total)
    return not at_work and not outlasts


def _length(connection: Connection, t: Tables, explorer: str) -> Length:
    row = connection.execute(select(t.lengths).where(t.lengths.c.explorer == explorer)).one_or_none()
    return Length() if row is None else Length(row.agreed, row.announced, row.is_behind)


def _set_length(connection: Connection, t: Tables, explorer: str, length: Length) -> None:
    values, mine = asdict(length), t.lengths.c.explorer == explorer
    if not connection.execute(update(t.lengths).where(mine).values(**values)).rowcount:
        connection.execute(insert(t.lengths).values(explorer=explorer, **values))


def explorers(connection: Connection, t: Tables) -> dict[str, ExplorerPresence]:
    s, p, e = t.steps.c, t.presence.c, t.explorers
    # One lookup of the last step per explorer: a run may have 100,000 steps, each with its position.
    last = select(s.step).where(s.explorer == e.c.name).order_by(s.step.desc()).limit(1)
    query = select(
        e, p.left, p.seen, p.total,
        last.scalar_subquery().label("step"), last.where(s.rows > 0).scalar_subquery().label("full"),
    ).outerjoin_from(e, t.presence, and_(p.role == EXPLORER, p.name == e.c.name))  # fmt: skip
    return {
        row.name: ExplorerPresence(
            row.waiting, bool(row.finished), bool(row.left), row.seen, row.total, row.step or 0,
            (row.step or 0) - (row.full or 0), (row.begun_rows, row.begun_version) if row.begun_rows else None,
        )
        for row in connection.execute(query)
    }  # fmt: skip


@dataclass(frozen=True)
class Contribution:
    """One explorer's share of a batch or of all batches."""

    rows: int
    staleness: float | None
    """Mean over the rows of the number of train steps between the oldest version that sampled a token of the group and
    the version that the rows trained; None without versions."""


def contributions(connection: Connection, t: Tables, step: int | None = None) -> dict[str, Contribution]:
    """Return explorer → its share in the batch of a train step, or (None) in all batches."""
    g, lg = t.groups.c, t.lease_groups.c
    versioned = case((g.oldest >= 0, g.size), else_=0)
    behind = case((g.oldest >= 0, g.size * (lg.step - 1 - g.oldest)), else_=0)
    query = select(g.explorer, func.sum(g.size), func.sum(versioned), func.sum(behind)).join(
        t.lease_groups, lg.group_id == g.id
    )
    query = query.group_by(g.explorer) if step is None else query.where(lg.step == step).group_by(g.explorer)
    return {
        name: Contribution(int(rows), float(lag) / int(with_lag) if with_lag else None)
        for name, rows, with_lag, lag in connection.execute(query)
    }


def untrained_rows(connection: Connection, t: Tables, explorer: str | None = None) -> int:
    g = t.groups.c
    query = select(func.sum(g.size)).where(in_queue(t.groups))
    return int(connection.scalar(query if explorer is None else query.where(g.explorer == explorer)) or 0)


def newest_leased(connection: Connection, t: Tables) -> int:
    leased, committed = select(func.max(t.leases.c.step)), select(t.meta.c.committed)
    return max(connection.scalar(leased) or 0, connection.execute(committed).scalar_one())


@dataclass(frozen=True)
class Stats:
    """Row counts by state, and the positions of trainer and explorers."""

    ready: int
    leased: int
    trained: int
    stale: int
    committed: int
    """The newest trainer step whose batch is final."""
    now: float
    """Unix seconds of the store's clock, which also dates `seen`."""
    explorers: dict[str, ExplorerPresence]


def stats_of(connection: Connection, t: Tables, now: float) -> Stats:
    g = t.groups.c
    by_state = select(g.state, func.sum(g.size)).where(kept(t), g.state <= State.STALE).group_by(g.state)
    rows = {state: int(size) for state, size in connection.execute(by_state)}
    ready, leased, trained, stale = (
        rows.get(state, 0) for state in (State.READY, State.LEASED, State.TRAINED, State.STALE)
    )
    committed = connection.execute(select(t.meta.c.committed)).scalar_one()
    return Stats(ready, leased, trained, stale, committed, now, explorers(connection, t))
