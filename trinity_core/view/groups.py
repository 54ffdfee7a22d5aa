"""Pages of a store's groups, newest first: each answer reads a bounded part of the store, however large that is.

Nothing asks for all rows: ids are read in windows, within a time limit, and where that ends before a page is full, the
answer says where to go on. Rewards are in the packed experiences only, so they are compared row by row.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, select

from trinity_core.data.experience import scalars
from trinity_core.store.schema import State, Tables

WINDOW = 20_000
"""Ids that one statement goes through."""
SECONDS = 1.0
"""For one page. What is left is another page."""
EXCERPT = 160
"""Characters of a prompt in a list."""
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
    taskset: str = ""
    group: str = ""
    """A part of the group's name or of its task's."""
    state: str = ""
    """A name of `State` in small letters."""
    reward_min: float | None = None
    """At least one rollout has a reward from here to `reward_max`."""
    reward_max: float | None = None

    @property
    def by_reward(self) -> bool:
        """True if rewards have to be read."""
        return self.reward_min is not None or self.reward_max is not None

    def takes(self, rewards: list[float | None]) -> bool:
        """True if one of the rewards is wanted."""
        low = float("-inf") if self.reward_min is None else self.reward_min
        high = float("inf") if self.reward_max is None else self.reward_max
        return not self.by_reward or any(reward is not None and low <= reward <= high for reward in rewards)


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
    chunk = min(limit, 8) if wanted.by_reward else limit
    while high > low and len(page.groups) < limit:
        start = max(low, high - WINDOW)
        rows = connection.execute(_query(t, wanted).where(t.groups.c.id >= start, t.groups.c.id < high).limit(chunk))
        found = rows.all()
        for row in found:
            if len(page.groups) == limit:
                break
            entry = _entry(connection, t, row)
            if wanted.takes(entry["rewards"]):
                page.groups.append(entry)
            high = row.id
        else:
            high = start if len(found) < chunk else high
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


def overview(connection: Connection, t: Tables) -> Json:
    """What there is to choose from, read from the ends of the table."""
    g = t.groups.c
    ends = select(g.id, g.task, g.newest).where(g.id >= 0)
    newest = connection.execute(ends.order_by(g.id.desc()).limit(2_000)).all()
    oldest = connection.execute(ends.order_by(g.id).limit(2_000)).all()
    names = {row.task.rpartition("/")[0] for row in (*newest, *oldest) if row.task}
    steps = connection.execute(select(t.steps.c.explorer, func.max(t.steps.c.step)).group_by(t.steps.c.explorer))
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    return {
        "groups": newest[0].id if newest else 0,
        "tasksets": sorted(names),
        "explorers": {row.explorer: row[1] for row in steps},
        "newest_version": max((row.newest for row in newest), default=-1),
        "checkpoint": meta.committed,
        "states": [state.name.lower() for state in State],
    }


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
    if wanted.taskset:
        query = query.where(g.task.startswith(f"{wanted.taskset}/", autoescape=True))
    if wanted.group:
        query = query.where(
            g.name.contains(wanted.group, autoescape=True) | g.task.contains(wanted.group, autoescape=True)
        )
    if wanted.state:
        query = query.where(g.state == int(State[wanted.state.upper()]))
    if wanted.by_reward:
        query = query.where(g.size > 0)
    return query


def _entry(connection: Connection, t: Tables, row: Row[Any]) -> Json:
    """A group for a list: its row, and what its experiences say without their tokens."""
    blob = connection.scalar(select(t.experiences.c.blob).where(t.experiences.c.group_id == row.id))
    members = scalars(blob) if blob is not None else []
    taskset, _, task_row = (row.task or "").rpartition("/")
    return {
        "id": row.id, "group": row.name, "explorer": row.explorer, "step": row.step, "task": row.task,
        "taskset": taskset, "row": task_row, "state": State(row.state).name.lower(), "size": row.size,
        "newest": row.newest, "oldest": row.oldest, "tries": row.tries, "failure": row.failure,
        "dropped": json.loads(row.dropped) if row.dropped else {}, "stored": blob is not None,
        "rewards": [each["reward"] for each in members],
        "lengths": [each["lengths"]["action_mask"] for each in members],
        "truncated": sum(each["truncated"] for each in members),
        "prompt": str(members[0]["info"].get("prompt", ""))[:EXCERPT] if members else "",
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
