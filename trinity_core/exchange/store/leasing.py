"""Leases, commits, rewinds and prunes the batches of train steps, each within one write transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from trinity_core.base.errors import TrinityError
from trinity_core.config.training import RETENTION
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.exchange.store import members
from trinity_core.exchange.store.expert import START, ExpertPosition, ExpertSource
from trinity_core.exchange.store.schema import EXPLORER, REWIND, State, Tables, in_queue, kept, statements
from trinity_core.exchange.store.strategies import Candidate, Choice, Strategy

CHUNK = 500
"""Ids per IN list, far below the parameter limits of SQLite and PostgreSQL."""
EVERY_ROW = 2**31 - 1


def leased_experiences(connection: Connection, t: Tables, step: int) -> list[Experience]:
    """Return the rollouts of a recorded lease, in order. Groups that share a name get distinct ones."""
    experiences: list[Experience] = []
    names: set[str] = set()
    for group_id, name, blob in statements(t).leased.run(connection, key=step).fetchall():
        unique = name if name and name not in names else f"{name}#{group_id}"
        names.add(unique)
        experiences += [e if unique == name else replace(e, group=unique) for e in from_bytes(blob)]
    return experiences


def leased_batch(
    connection: Connection, t: Tables, step: int, expert: ExpertSource | None, record: str | None
) -> list[Experience]:
    """Return the rollouts of a recorded lease, then its expert rows, which `record` names."""
    rollouts = leased_experiences(connection, t, step)
    return rollouts + (expert_rows(expert, record) if expert and record else [])


def candidates(
    connection: Connection, t: Tables, strategy: Strategy, rows: int, now: float, step: int
) -> list[Candidate]:
    """Return the groups from which `strategy` may choose the batch of `step`, in order of insertion."""
    if strategy.cooldown is None and not strategy.whole_queue:  # a group has at least one row
        return [Candidate(*row) for row in statements(t).oldest_ready.run(connection, count=rows).fetchall()]
    g = t.groups.c
    columns = (g.id, g.size, g.newest, g.oldest, g.explorer, g.step)
    groups = [Candidate(*row) for row in connection.execute(select(*columns).where(in_queue(t.groups)))]
    if strategy.cooldown is not None:
        used = _used(connection, t, sunk_since(connection, t, step, strategy.cooldown)).subquery()
        cool = select(*columns, used.c.uses).join(used, used.c.group_id == g.id)
        cool = cool.where(g.state.in_((State.LEASED, State.TRAINED)), used.c.last <= now - strategy.cooldown)
        if strategy.use_limit is not None:
            cool = cool.where(used.c.uses < strategy.use_limit)
        groups += [Candidate(*row) for row in connection.execute(cool)]
    groups.sort(key=lambda group: group.id)
    return groups if strategy.whole_queue else groups[:rows]


def sunk_since(connection: Connection, t: Tables, step: int, cooldown: float) -> float:
    """Return the time of last use before which a used group is no longer considered.

    Such a group could have been taken again in each of the last `RETENTION` train steps before `step` and was not, so
    others always rank above it.
    """
    last_use = (
        select(t.leases.c.at).where(t.leases.c.step <= step - RETENTION).order_by(t.leases.c.step.desc()).limit(1)
    )
    at = connection.scalar(last_use)
    return -inf if at is None else at - cooldown


def _used(connection: Connection, t: Tables, since: float) -> Select[tuple[int, int, float]]:
    """Select each group used after `since`: its id, its number of batches, and the time of the last one.

    Skips batches older than the oldest such group's policy; a long run has many of them.
    """
    lg, at = t.lease_groups.c, t.leases.c.at
    recent = _used_after(t, since)
    oldest = connection.scalar(select(func.min(t.groups.c.newest)).where(t.groups.c.id.in_(recent)))
    uses = select(lg.group_id, func.count().label("uses"), func.max(at).label("last"))
    uses = uses.join(t.leases, t.leases.c.step == lg.step).group_by(lg.group_id)
    return uses.where(lg.group_id.in_(recent), lg.step > (oldest or 0))


def _used_after(t: Tables, since: float) -> Select[tuple[int]]:
    lg = t.lease_groups.c
    return select(lg.group_id).join(t.leases, t.leases.c.step == lg.step).where(t.leases.c.at > since)


def check_lineage(groups: Sequence[Candidate], newest_version: int) -> None:
    """Raise TrinityError if a row was sampled by a version that this lineage does not have yet."""
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
    """Record the groups of `choice` as the batch of `step`; with `reuse`, they may also be in earlier batches."""
    sql = statements(t)
    sql.add_lease.run(connection, step=step, rows=choice.rows, at=now, expert=expert, reuse=reuse)
    if choice.take:
        rows = [{"step": step, "ordinal": i, "group_id": group.id} for i, group in enumerate(choice.take)]
        sql.add_lease_groups.run_many(connection, rows)
        sql.mark_leased.run_many(connection, [{"key": group.id} for group in choice.take])


def mark_stale(connection: Connection, t: Tables, groups: Sequence[Candidate], step: int) -> None:
    """Remove `groups` from the queue; a rewind to before `step` restores them."""
    for ids in chunks([group.id for group in groups]):
        connection.execute(update(t.groups).where(t.groups.c.id.in_(ids)).values(state=State.STALE, stale_at=step))


def mark_displaced(connection: Connection, t: Tables, step: int) -> None:
    """Mark as stale the groups that were in the queue for `RETENTION` train steps, each of which took newer ones only.

    Not where a trainer works through a queue that is no longer filled: it comes to the oldest last.
    """
    g, lg = t.groups.c, t.lease_groups.c
    newest_of = select(func.max(lg.group_id))
    put_by_then = newest_of.where(lg.step == step - RETENTION).scalar_subquery()
    taken_now = newest_of.where(lg.step == step - 1).scalar_subquery()
    taken = select(lg.group_id).where(lg.step > step - RETENTION)
    oldest_taken = select(func.min(g.newest)).where(g.id.in_(taken)).scalar_subquery()
    displaced = in_queue(t.groups) & (g.id < put_by_then) & (put_by_then < taken_now) & (g.newest < oldest_taken)
    connection.execute(update(t.groups).where(displaced).values(state=State.STALE, stale_at=step))


def expert_position(connection: Connection, t: Tables, step: int) -> ExpertPosition:
    """Return the expert position at which trainer step `step` begins."""
    query = select(t.leases.c.expert).where(t.leases.c.step < step, t.leases.c.expert.is_not(None))
    last = connection.execute(query.order_by(t.leases.c.step.desc()).limit(1)).scalar()
    position: ExpertPosition = START if last is None else json.loads(last)["after"]
    return position


def expert_rows(expert: ExpertSource, record: str) -> list[Experience]:
    value = json.loads(record)
    return expert.take(value["rows"], value["before"])[0]


def chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """Split `ids` into lists short enough for one statement."""
    return [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)]


def rewind(connection: Connection, t: Tables, step: int) -> tuple[int, dict[str, int]]:
    """Undo everything after trainer step `step`, within a write transaction; return the number of lost rows, and
    finished explorer -> the first of its steps that are undone.

    Batches up to `step` are final. Later batches return to the queue in their old order (by id). An explore step that
    used a version newer than `step` is deleted with all later steps of its explorer.

    A new lineage begins exactly if a version newer than `step` may exist: each trainer step has a lease before it
    creates its version. A rewound explorer starts over; the others keep waiting for their version. One that had
    finished is not running, so it counts as not yet seen.
    """
    mark_trained(connection, t, step)
    stale = (t.groups.c.state == State.STALE) & (t.groups.c.stale_at > step)
    connection.execute(update(t.groups).where(kept(t), stale).values(state=State.READY, stale_at=None))
    lineage = connection.execute(select(t.meta.c.lineage)).scalar_one()
    first = _first_steps_to_drop(connection, t, step)
    later = connection.execute(select(func.count()).select_from(t.leases).where(t.leases.c.step > step)).scalar_one()
    if not first and not later:
        return 0, {}
    finished = set(connection.scalars(select(t.explorers.c.name).where(t.explorers.c.finished)))
    pruned = _release(connection, t, step)
    for explorer, begin in first.items():
        _drop_steps(connection, t, explorer, begin)
        if explorer in finished:
            members.note(connection, t, EXPLORER, explorer, seen=None)
    connection.execute(update(t.meta).values(lineage=lineage + 1, committed=step))
    connection.execute(insert(t.presence).values(role=REWIND, name=str(lineage + 1), total=step))
    bounded = update(t.explorers).where(t.explorers.c.begun_rows.is_not(None))
    connection.execute(
        bounded.values(waiting=None, begun_rows=None, begun_version=None)
    )  # they request admission again
    return _count_rows(connection, t, pruned), {name: begin for name, begin in first.items() if name in finished}


def mark_trained(connection: Connection, t: Tables, step: int) -> None:
    """Make the batches up to `step` final: a checkpoint contains those steps."""
    committed = select(t.meta.c.committed).scalar_subquery()
    later = select(t.lease_groups.c.group_id).where(t.lease_groups.c.step > committed, t.lease_groups.c.step <= step)
    connection.execute(
        update(t.groups).where(t.groups.c.state == State.LEASED, t.groups.c.id.in_(later)).values(state=State.TRAINED)
    )
    connection.execute(update(t.meta).where(t.meta.c.committed < step).values(committed=step))


def prune(connection: Connection, t: Tables, step: int, strategy: Strategy) -> int:
    """Delete final rows last used in `step` or before, and rows stale by then. Return their number.

    Reusable rows stay while they have uses left and may still be chosen (`sunk_since`).

    Their groups stay in the ledger as PRUNED.
    """
    g = t.groups.c
    later = select(t.lease_groups.c.group_id).where(t.lease_groups.c.step > step)
    trained = (g.state == State.TRAINED) & g.id.not_in(later)
    if strategy.cooldown is not None:
        sunk = g.id.not_in(_used_after(t, sunk_since(connection, t, step, strategy.cooldown)))
        limit = EVERY_ROW if strategy.use_limit is None else strategy.use_limit
        uses = select(t.lease_groups.c.group_id).group_by(t.lease_groups.c.group_id)
        trained = trained & (sunk | g.id.in_(uses.having(func.count() >= limit)))
    ids = list(
        connection.scalars(select(g.id).where(kept(t), trained | (g.state == State.STALE) & (g.stale_at <= step)))
    )
    rows = _count_rows(connection, t, ids)
    for some in chunks(ids):
        connection.execute(delete(t.experiences).where(t.experiences.c.group_id.in_(some)))
        connection.execute(update(t.groups).where(g.id.in_(some)).values(state=State.PRUNED))
    return rows


def _first_steps_to_drop(connection: Connection, t: Tables, step: int) -> dict[str, int]:
    query = select(t.steps.c.explorer, func.min(t.steps.c.step)).where(t.steps.c.version > step)
    return dict(connection.execute(query.group_by(t.steps.c.explorer)).tuples().all())


def _release(connection: Connection, t: Tables, step: int) -> list[int]:
    """Return the batches after `step` to the queue. Returns the ids of their pruned groups, which cannot be
    restored."""
    g, lg = t.groups.c, t.lease_groups.c
    ids = list(connection.scalars(select(lg.group_id).where(lg.step > step).distinct()))
    unpruned = g.state != State.PRUNED
    used_before = g.id.in_(select(lg.group_id).where(lg.step <= step))
    pruned: list[int] = []
    for some in chunks(ids):
        pruned += connection.scalars(select(g.id).where(g.id.in_(some), ~unpruned, ~used_before))
        connection.execute(update(t.groups).where(g.id.in_(some), unpruned, ~used_before).values(state=State.READY))
        connection.execute(update(t.groups).where(g.id.in_(some), unpruned, used_before).values(state=State.TRAINED))
    connection.execute(delete(t.lease_groups).where(lg.step > step))
    connection.execute(delete(t.leases).where(t.leases.c.step > step))
    return pruned


def _count_rows(connection: Connection, t: Tables, ids: list[int]) -> int:
    """Count the rows of those groups that are still in the ledger."""
    g = t.groups.c
    sizes = (connection.scalar(select(func.sum(g.size)).where(g.id.in_(some))) for some in chunks(ids))
    return sum(int(size or 0) for size in sizes)


def _drop_steps(connection: Connection, t: Tables, explorer: str, first: int) -> None:
    g = t.groups.c
    trained = g.id.in_(select(t.lease_groups.c.group_id))
    ids = list(connection.scalars(select(g.id).where(g.explorer == explorer, g.step >= first, ~trained)))
    for some in chunks(ids):
        connection.execute(delete(t.experiences).where(t.experiences.c.group_id.in_(some)))
        connection.execute(delete(t.groups).where(g.id.in_(some)))
    connection.execute(delete(t.steps).where(t.steps.c.explorer == explorer, t.steps.c.step >= first))
    fresh = {"finished": False, "waiting": None}
    connection.execute(update(t.explorers).where(t.explorers.c.name == explorer).values(**fresh))
