"""Taking a batch for a trainer step, inside one write transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, and_, func, or_, select, update

from trinity_core.data.experience import Experience, from_bytes
from trinity_core.errors import TrinityError
from trinity_core.store.expert import START, ExpertPosition, ExpertSource
from trinity_core.store.priorities import Candidate
from trinity_core.store.schema import State, Tables, in_queue
from trinity_core.store.statements import statements
from trinity_core.store.strategies import Choice, Strategy

CHUNK = 500
"""Ids in one IN list: SQLite's and PostgreSQL's limits on parameters are far above."""
EVERY_ROW = 2**31 - 1
"""More rows than any queue has."""


def leased_experiences(connection: Connection, t: Tables, step: int) -> list[Experience]:
    """The rollouts of a recorded lease, in its order. Groups that share a name get distinct ones."""
    experiences: list[Experience] = []
    names: set[str] = set()
    for group_id, name, blob in statements(t).leased.run(connection, key=step).fetchall():
        unique = name if name and name not in names else f"{name}#{group_id}"
        names.add(unique)
        experiences += [e if unique == name else replace(e, group=unique) for e in from_bytes(blob)]
    return experiences


def candidates(connection: Connection, t: Tables, strategy: Strategy, rows: int, now: float) -> list[Candidate]:
    """The groups `strategy` may choose from, in order of insertion."""
    if strategy.cooldown is None and not strategy.whole_queue:  # a group has at least one row
        return [Candidate(*row) for row in statements(t).oldest_ready.run(connection, count=rows).fetchall()]
    uses = select(t.lease_groups.c.group_id, func.count().label("uses"), func.max(t.leases.c.at).label("last")).join(
        t.leases, t.leases.c.step == t.lease_groups.c.step
    )
    used = uses.group_by(t.lease_groups.c.group_id).subquery()
    g = t.groups.c
    columns = (g.id, g.size, g.newest, g.oldest, g.explorer, g.step)
    if strategy.cooldown is None:
        query = select(*columns).where(in_queue(t.groups))
    else:
        cool = and_(g.state.in_((State.LEASED, State.TRAINED)), used.c.last <= now - strategy.cooldown)
        if strategy.use_limit is not None:
            cool = and_(cool, used.c.uses < strategy.use_limit)
        query = (
            select(*columns, func.coalesce(used.c.uses, 0))
            .outerjoin(used, used.c.group_id == g.id)
            .where(or_(in_queue(t.groups), cool))
        )
    query = query.order_by(g.id)
    if not strategy.whole_queue:
        query = query.limit(rows)
    return [Candidate(*row) for row in connection.execute(query)]


def check_lineage(groups: Sequence[Candidate], newest_version: int) -> None:
    """Raise `TrinityError` if a row was sampled by a version that this lineage does not have yet."""
    ahead = max((group.newest for group in groups), default=-1)
    if ahead > newest_version:
        raise TrinityError(
            f"the experience store holds rows of weight version {ahead}, but the trainer is at {newest_version}: "
            "the store was not rewound to the checkpoint that training resumes from"
        )


def record_lease(
    connection: Connection, t: Tables, step: int, choice: Choice, now: float, expert: str | None = None,
    reuse: bool = False,
) -> None:  # fmt: skip
    """Record the groups of `choice` as the batch of `step`; with `reuse`, earlier batches may have had them too."""
    sql = statements(t)
    sql.add_lease.run(connection, step=step, rows=choice.rows, at=now, expert=expert, reuse=reuse)
    if choice.take:
        rows = [{"step": step, "ordinal": i, "group_id": group.id} for i, group in enumerate(choice.take)]
        sql.add_lease_groups.run_many(connection, rows)
        sql.mark_leased.run_many(connection, [{"key": group.id} for group in choice.take])


def mark_stale(connection: Connection, t: Tables, groups: Sequence[Candidate], step: int) -> None:
    """Remove `groups` from the queue, unless the store is later rewound to before `step`."""
    for ids in chunks([group.id for group in groups]):
        connection.execute(update(t.groups).where(t.groups.c.id.in_(ids)).values(state=State.STALE, stale_at=step))


def expert_position(connection: Connection, t: Tables, step: int) -> ExpertPosition:
    """The first expert position of trainer step `step`: after the rows of the last step before it."""
    query = select(t.leases.c.expert).where(t.leases.c.step < step, t.leases.c.expert.is_not(None))
    last = connection.execute(query.order_by(t.leases.c.step.desc()).limit(1)).scalar()
    return START if last is None else _position(json.loads(last)["after"])


def expert_rows(expert: ExpertSource, record: str) -> list[Experience]:
    """The expert rows of a recorded lease."""
    value = json.loads(record)
    return expert.take(value["rows"], _position(value["before"]))[0]


def _position(value: dict[str, int]) -> ExpertPosition:
    return ExpertPosition(epoch=value["epoch"], offset=value["offset"])


def chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in lists short enough for one statement."""
    return [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)]
