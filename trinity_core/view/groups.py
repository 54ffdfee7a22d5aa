"""Pages of a store's groups, newest first: each answer reads a bounded part of the store, however large that is.

Nothing asks for all rows: ids are read in windows, within a time limit, and where that ends before a page is full, the
answer says where to go on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, select

from trinity_core.store.schema import State, Tables

WINDOW = 20_000
"""Ids that one statement goes through."""
SECONDS = 1.0
"""For one page. What is left is another page."""
BATCHES = 20_000
"""Rows of batches in which that of a group is looked for."""

Json = dict[str, Any]


@dataclass(frozen=True)
class GroupFilter:
    """Which groups are wanted; None and "" mean all."""

    step: int | None = None
    """Explore step."""
    version: int | None = None
    """The newest policy version that sampled a token of the group."""
    group: str = ""
    """A part of the group's name or of its task's."""
    state: str = ""
    """A name of `State` in small letters."""


@dataclass
class GroupPage:
    """Groups in descending order of id."""

    groups: list[Json] = field(default_factory=list)
    before: int | None = None
    """The next page begins before this id; None: this was the last one."""


def find_groups(
    connection: Connection, t: Tables, wanted: GroupFilter, before: int | None = None, limit: int = 30,
    seconds: float = SECONDS,
) -> GroupPage:  # fmt: skip
    """The next `limit` groups before id `before`; fewer, with a place to go on from, when the time is over."""
    deadline = time.monotonic() + seconds
    low, high = _bounds(connection, t, wanted.step)
    high = high if before is None else min(high, before)
    page = GroupPage()
    while high > low and len(page.groups) < limit:
        start, left = max(low, high - WINDOW), limit - len(page.groups)
        rows = connection.execute(_query(t, wanted).where(t.groups.c.id >= start, t.groups.c.id < high).limit(left))
        found = rows.all()
        page.groups += [_entry(connection, t, row) for row in found]
        high = found[-1].id if len(found) == left else start
        if time.monotonic() > deadline:
            break
    page.before = high if high > low else None
    return page


def group_row(connection: Connection, t: Tables, group_id: int) -> Json | None:
    """One group as in a page, with the train steps that had it."""
    row = connection.execute(select(*_columns(t)).where(t.groups.c.id == group_id)).one_or_none()
    if row is None:
        return None
    b = t.lease_groups.c
    some = select(b.step, b.group_id).where(b.step > row.newest).order_by(b.step, b.ordinal).limit(BATCHES).subquery()
    steps = connection.scalars(select(some.c.step).where(some.c.group_id == group_id)).all()
    return _entry(connection, t, row) | {"train_steps": sorted(steps)}


def _columns(t: Tables) -> list[Any]:
    g = t.groups.c
    return [
        g.id, g.name, g.explorer, g.step, g.task, g.state, g.size, g.newest, g.oldest, g.produced, g.tries, g.dropped,
        g.failure,
    ]  # fmt: skip


def _query(t: Tables, wanted: GroupFilter) -> Any:
    """The groups whose own columns are wanted, newest first."""
    g = t.groups.c
    query = select(*_columns(t)).order_by(g.id.desc())
    if wanted.step is not None:
        query = query.where(g.step == wanted.step)
    if wanted.version is not None:
        query = query.where(g.newest == wanted.version)
    if wanted.group:
        query = query.where(
            g.name.contains(wanted.group, autoescape=True) | g.task.contains(wanted.group, autoescape=True)
        )
    if wanted.state:
        query = query.where(g.state == int(State[wanted.state.upper()]))
    return query


def _entry(connection: Connection, t: Tables, row: Row[Any]) -> Json:
    """A group as JSON; `stored` says whether its experiences are there."""
    e = t.experiences.c
    stored = connection.scalar(select(e.group_id).where(e.group_id == row.id)) is not None
    return {
        "id": row.id, "group": row.name, "explorer": row.explorer, "step": row.step, "task": row.task,
        "state": State(row.state).name.lower(), "size": row.size, "newest": row.newest, "oldest": row.oldest,
        "tries": row.tries, "failure": row.failure, "dropped": json.loads(row.dropped) if row.dropped else {},
        "stored": stored,
    }  # fmt: skip


def _bounds(connection: Connection, t: Tables, step: int | None) -> tuple[int, int]:
    """Ids from the first to before the second hold all groups (of explore step `step`)."""
    g = t.groups.c
    first, last = connection.execute(select(func.min(g.id), func.max(g.id))).one()
    if first is None:
        return 0, 0
    if step is None:
        return first, last + 1
    explorers = connection.scalars(select(t.explorers.c.name)).all()
    ranges = [
        (_first(connection, t, name, step, first, last + 1), _first(connection, t, name, step + 1, first, last + 1))
        for name in explorers
    ]
    return min((low for low, _ in ranges), default=first), max((high for _, high in ranges), default=last + 1)


def _first(connection: Connection, t: Tables, explorer: str, step: int, low: int, high: int) -> int:
    """An id before which no group of `step` or later is, and after which none of an earlier one, by bisection.

    The steps of one explorer ascend with the ids of their groups, whose numbers a rewind never gives again.
    """
    g = t.groups.c
    while low < high:
        middle = (low + high) // 2
        query = select(g.id, g.step).where(g.id >= middle, g.id < high, g.explorer == explorer).order_by(g.id).limit(1)
        row = connection.execute(query).one_or_none()
        if row is None or row.step >= step:
            high = middle
        else:
            low = row.id + 1
    return low
