"""Who takes part in a run: when explorers and trainer were last seen, and whether the trainer has finished.

Each records every `SEEN_SECONDS` in the store that it is alive, so that a wait can name who is missing. The trainer has
finished when a checkpoint holds the last of its steps, or when it has ended because no more experiences came: a rewind,
or a trainer with more steps, makes it unfinished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, case, delete, func, insert, select, update

from trinity_core.store.schema import EXPLORER, TRAINER, State, Tables, in_queue, kept

SEEN_SECONDS = 10.0
"""Between two notes of the same process."""
ANNOUNCED = "announced"
"""Role of a row with the length of an explorer's run that is longer than before, while the trainer's has yet to be.
It is `expected` if the trainer already had more steps: that one is meant, and not a later one."""
LENGTH = "length"
"""Role of a row with the length of an explorer's run while the trainer worked: `total_steps`, the same whatever the
number of tasks that a train step takes; without it the explore steps."""
LOST_SECONDS = 60.0
"""An explorer that is not seen for this long counts as lost: others that wait to begin a step ignore its step."""


@dataclass(frozen=True)
class TrainerPresence:
    """The trainer as the store knows it."""

    lineage: int
    committed: int
    """The step of its newest checkpoint."""
    total: int | None
    """Train steps in all; None: no trainer has begun."""
    seen: float | None
    """When it was last seen, in Unix seconds; None: never."""
    expected: bool = False
    """True if it is about to begin again, perhaps with more steps."""
    ended: bool = False
    """True if it has ended before its last step, because no more experiences came."""

    @property
    def finished(self) -> bool:
        """True if it trains on nothing more: a checkpoint holds its last step, or it has ended before that."""
        return not self.expected and self.total is not None and (self.ended or self.committed >= self.total)

    def describe(self, now: float) -> str:
        """A text for log lines: `trainer with a checkpoint of step 4 of 20, last seen 12 s ago`."""
        if self.seen is None:
            return "no trainer has been seen yet"
        of = "" if self.total is None else f" of {self.total}"
        return (
            f"trainer with a checkpoint of step {self.committed}{of}, last seen {max(0.0, now - self.seen):.0f} s ago"
        )


def note(connection: Connection, t: Tables, role: str, name: str, **values: Any) -> None:
    """Record values (`seen`, `total`, `left`, `expected`) of a member."""
    p = t.presence
    mine = and_(p.c.role == role, p.c.name == name)
    if not connection.execute(update(p).where(mine).values(**values)).rowcount:
        connection.execute(insert(p).values(role=role, name=name, **values))


def trainer_state(connection: Connection, t: Tables) -> TrainerPresence:
    """The trainer's state."""
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    p = t.presence.c
    rows = connection.execute(
        select(p.total, p.seen, p.expected, p.left).where(p.role == TRAINER).order_by(p.seen.desc()).limit(1)
    ).one_or_none()
    return TrainerPresence(meta.lineage, meta.committed, *(rows or (None, None)))


def begin_trainer(connection: Connection, t: Tables, name: str, total: int, now: float) -> None:
    """A trainer of `total` steps begins. If these are more than before, explorers that have finished may have more too:
    they are waited for until they say again that they have finished, except those that have begun with more already.
    """
    p, before = t.presence, trainer_state(connection, t).total
    note(connection, t, TRAINER, name, total=total, seen=now, expected=False, left=False)
    rows = connection.execute(select(p.c.name, p.c.total, p.c.expected).where(p.c.role == ANNOUNCED)).all()
    ahead = [row.name for row in rows if not row.expected]
    if before is not None and before < total:
        connection.execute(update(t.explorers).where(t.explorers.c.name.not_in(ahead)).values(finished=False))
        others = and_(p.c.role == EXPLORER, p.c.name.not_in(ahead))
        connection.execute(update(p).where(others).values(expected=True))
        connection.execute(delete(p).where(p.c.role == ANNOUNCED))
    elif not trainer_state(connection, t).finished:
        answers = [row.name for row in rows if row.expected]
        connection.execute(update(p).where(p.c.role == EXPLORER, p.c.name.in_(answers)).values(expected=False))
        connection.execute(delete(p).where(p.c.role == ANNOUNCED, p.c.name.in_(answers)))
    if not trainer_state(connection, t).finished:
        for row in rows:
            note(connection, t, LENGTH, row.name, total=row.total)


def join_explorer(
    connection: Connection, t: Tables, name: str, total: int | None, length: int | None, now: float
) -> bool:
    """An explorer of `total` steps begins (None: it ends with the trainer), for a run of that `length`. True if its
    rollouts would not be trained on.

    That is so if the trainer has finished, unless this run is longer than when the trainer worked: then a trainer with
    more steps is expected too, and until it begins this length is only announced. It is announced as well if the
    trainer has not finished, unless it has more steps since this explorer was last there. A trainer that had more and
    has ended early may begin again with the same: to that one the announcement is the answer.
    """
    p = t.presence.c
    roles = select(p.role, p.total, p.expected).where(p.role.in_((EXPLORER, LENGTH, ANNOUNCED)), p.name == name)
    known = {row.role: row for row in connection.execute(roles)}
    before = known[LENGTH].total if LENGTH in known else None
    is_expected = EXPLORER in known and known[EXPLORER].expected
    has_more = before is not None and length is not None and length > before
    connection.execute(delete(t.presence).where(p.role == ANNOUNCED, p.name == name))
    trainer = trainer_state(connection, t)
    is_over = trainer.finished
    may_begin_again = is_over and trainer.ended
    is_answered = not is_expected or ((has_more or before is None) and not may_begin_again)
    note(connection, t, EXPLORER, name, seen=now, left=False, total=total, expected=not is_answered)
    is_ahead = has_more and (is_over or not is_expected)
    if is_ahead or (ANNOUNCED in known and length == before and not is_over):
        note(connection, t, ANNOUNCED, name, total=length, expected=not is_answered)
    if not is_over:
        note(connection, t, LENGTH, name, total=length)
    return is_over and not has_more


def explorers(connection: Connection, t: Tables) -> dict[str, dict[str, Any]]:
    """What is known of each explorer, by its name; see `Stats.explorers`."""
    s, p = t.steps.c, t.presence.c
    # Each is one look at the end of an explorer's steps: a run may have 100,000 of them, each with its position.
    last = select(s.step).where(s.explorer == t.explorers.c.name).order_by(s.step.desc()).limit(1)
    ends = select(t.explorers, last.scalar_subquery(), last.where(s.rows > 0).scalar_subquery())
    noted = select(p.name, p.total, p.seen, p.left).where(p.role == EXPLORER)
    members = {row.name: row for row in connection.execute(noted)}
    known: dict[str, dict[str, Any]] = {}
    for explorer in connection.execute(ends):
        step, full = (number or 0 for number in explorer[-2:])
        member = members.get(explorer.name)
        known[explorer.name] = {
            "step": step,
            "waiting": explorer.waiting,
            "finished": bool(explorer.finished),
            "total": member.total if member else None,
            "seen": member.seen if member else None,
            "left": bool(member and member.left),
            "empty_steps": step - full,
        }
    return known


@dataclass(frozen=True)
class Contribution:
    """What batches have of one explorer."""

    rows: int
    staleness: float | None
    """Mean over the rows of the train steps between the oldest version that sampled a token of their group and the
    version that they trained; None without versions."""


def contributions(connection: Connection, t: Tables, step: int | None = None) -> dict[str, Contribution]:
    """The share of each explorer, by its name, in the batch of a train step, or (None) in all of them."""
    g, lg = t.groups.c, t.lease_groups.c
    versioned = case((g.oldest >= 0, g.size), else_=0)
    behind = case((g.oldest >= 0, g.size * (lg.step - 1 - g.oldest)), else_=0)
    query = select(g.explorer, func.sum(g.size), func.sum(versioned), func.sum(behind)).join(
        t.lease_groups, lg.group_id == g.id
    )
    query = query.group_by(g.explorer) if step is None else query.where(lg.step == step).group_by(g.explorer)
    return {
        name: Contribution(int(rows), float(lag) / int(known) if known else None)
        for name, rows, known, lag in connection.execute(query)
    }


def untrained_rows(connection: Connection, t: Tables, explorer: str | None = None) -> int:
    """Rows in the queue, of all explorers or of one."""
    g = t.groups.c
    query = select(func.sum(g.size)).where(in_queue(t.groups))
    return int(connection.scalar(query if explorer is None else query.where(g.explorer == explorer)) or 0)


def is_lost(seen: float | None, now: float) -> bool:
    """True if not seen recently. A time far ahead is from before the clock was set back."""
    return seen is None or abs(now - seen) >= LOST_SECONDS


def is_expected(explorer: Mapping[str, Any]) -> bool:
    """True if an explorer of `Stats.explorers` has steps left: it has neither finished nor left."""
    return not explorer["finished"] and not explorer["left"]


def all_is_dropped(known: Mapping[str, Mapping[str, Any]], before: Mapping[str, int], now: float) -> bool:
    """True if explorers are at work, and each has put steps since `before` (name -> step), the last ones without a row.

    Then no wait helps. An explorer that is lost, or long within a step, may still bring rows.
    """
    working = {name: explorer for name, explorer in known.items() if is_expected(explorer)}
    return bool(working) and all(
        state["empty_steps"] and state["step"] > before.get(name, 0) and not is_lost(state["seen"], now)
        for name, state in working.items()
    )


def describe_explorers(known: Mapping[str, Mapping[str, Any]], now: float) -> str:
    """A text for log lines: `explorers known: explorer (step 12 of 60, last seen 3 s ago)`."""
    if not known:
        return "no explorer has been seen yet"
    return "explorers known: " + ", ".join(f"{name} ({_describe(state, now)})" for name, state in sorted(known.items()))


def _describe(explorer: Mapping[str, Any], now: float) -> str:
    of = "" if explorer["total"] is None else f" of {explorer['total']}"
    parts = [f"step {explorer['step']}{of}"]
    if explorer["empty_steps"]:
        parts.append(f"no experience left of its last {explorer['empty_steps']} steps")
    if explorer["finished"] or explorer["left"]:
        return ", ".join([*parts, "finished" if explorer["finished"] else "left"])
    if explorer["waiting"] is not None:
        parts.append(f"waits for version {explorer['waiting']}")
    seen = explorer["seen"]
    return ", ".join([*parts, "never seen" if seen is None else f"last seen {max(0.0, now - seen):.0f} s ago"])


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

    Lost explorers are ignored if another one waits this way: they may come back, but not before it continues. Those
    that have left are not waited for at all, unless all have.
    """
    e, p = t.explorers.c, t.presence.c
    left = select(p.name).where(p.role == EXPLORER, p.left)
    states = connection.execute(select(e.name, e.waiting, e.finished).where(e.name.not_in(left))).all()
    lost = lost_explorers(connection, t, now)
    waits = {row.name for row in states if row.waiting is not None and row.waiting > newest_version}
    left_out = lost if waits - lost else set()
    return bool(states) and all(row.finished or row.name in waits | left_out for row in states)


def lost_explorers(connection: Connection, t: Tables, now: float) -> set[str]:
    """Explorers that have been seen, but not recently."""
    p = t.presence.c
    seen = connection.execute(select(p.name, p.seen).where(p.role == EXPLORER, p.seen.is_not(None)))
    return {row.name for row in seen if is_lost(row.seen, now)}


@dataclass(frozen=True)
class Stats:
    """Row counts by state, and the position of trainer and explorers."""

    ready: int
    leased: int
    trained: int
    stale: int
    ready_groups: int
    oldest_ready_version: int | None
    lineage: int
    committed: int
    """The newest trainer step whose batch is final."""
    leased_step: int
    """The newest trainer step that has a batch."""
    now: float
    """Unix seconds by the store's clock, which also dates `seen`."""
    explorers: dict[str, dict[str, Any]]
    """By name: `step`, `waiting` (a version or None), `finished`, `total` (steps in all), `seen` (Unix seconds),
    `left` (before its last step), and `empty_steps`, the number of its last steps without a row."""


def stats_of(connection: Connection, t: Tables, now: float) -> Stats:
    """The counts within one transaction."""
    g = t.groups.c
    by_state = select(g.state, func.count(), func.sum(g.size), func.min(g.oldest)).group_by(g.state)
    counts = {row[0]: row for row in connection.execute(by_state.where(kept(t), g.state <= State.STALE))}
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    leased_step = connection.execute(select(func.max(t.leases.c.step))).scalar() or 0
    rows = {state: int(counts[state][2]) if state in counts else 0 for state in State}
    ready = counts.get(State.READY)
    return Stats(
        ready=rows[State.READY], leased=rows[State.LEASED], trained=rows[State.TRAINED], stale=rows[State.STALE],
        ready_groups=ready[1] if ready else 0, oldest_ready_version=ready[3] if ready else None,
        lineage=meta.lineage, committed=meta.committed, leased_step=leased_step, now=now,
        explorers=explorers(connection, t),
    )  # fmt: skip
