"""Pages of a store's groups, newest first."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from trinity_core.store.schema import State, Tables

Json = dict[str, Any]


@dataclass(frozen=True)
class GroupFilter:
    """Filter for groups; None and "" match all."""

    step: int | None = None
    version: int | None = None
    """The newest policy version that sampled a token of the group."""
    group: str = ""
    """Substring of the group's or task's name."""
    state: str = ""
    """A name of `State` in lower case."""
    since: int | None = None
    """Only the latest draws of tasks that were drawn both up to this explore step and after it."""


@dataclass(frozen=True)
class GroupPage:
    groups: list[Json]
    before: int | None
    """The next page begins before this id; None: this is the last page."""


def find_groups(
    connection: Connection, t: Tables, wanted: GroupFilter, before: int | None = None, limit: int = 30
) -> GroupPage:
    query = groups_query(t, wanted, before).limit(limit + 1)
    rows = connection.execute(query).all()
    page = rows[:limit]
    return GroupPage(_entries(connection, t, page), page[-1].id if len(rows) > limit else None)


def group_row(connection: Connection, t: Tables, group_id: int) -> Json | None:
    rows = connection.execute(select(t.groups).where(t.groups.c.id == group_id)).all()
    return next(iter(_entries(connection, t, rows)), None)


def earlier_draws(connection: Connection, t: Tables, groups: Sequence[Json], since: int) -> dict[str, Json]:
    """Return task → latest group up to an explore step, for the tasks of these groups."""
    g = t.groups.c
    drawn = g.task.in_([group["task"] for group in groups]) & (g.step <= since)
    latest = select(func.max(g.id)).where(drawn).group_by(g.task)
    rows = connection.execute(select(t.groups).where(g.id.in_(latest))).all()
    return {entry["task"]: entry for entry in _entries(connection, t, rows)}


def groups_query(t: Tables, wanted: GroupFilter, before: int | None = None) -> Select[Any]:
    """Select the matching groups, newest first, in one pass by primary key."""
    g = t.groups.c
    query = select(t.groups).order_by(g.id.desc())
    if before is not None:
        query = query.where(g.id < before)
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
    if wanted.since is not None:
        latest = select(func.max(g.id)).where(g.step > wanted.since, g.task.is_not(None)).group_by(g.task)
        query = query.where(g.id.in_(latest), g.task.in_(select(g.task).where(g.step <= wanted.since)))
    return query


def _entries(connection: Connection, t: Tables, rows: Sequence[Row[Any]]) -> list[Json]:
    """Return groups as JSON. `stored`: their experiences are in the store; `train_steps`: the steps whose batches
    contain them."""
    ids = [row.id for row in rows]
    experiences, batches = t.experiences.c, t.lease_groups.c
    stored = {*connection.scalars(select(experiences.group_id).where(experiences.group_id.in_(ids)))}
    # A batch contains only groups older than its step.
    since = batches.step > min((row.newest for row in rows), default=0)
    train_steps: dict[int, list[int]] = defaultdict(list)
    for step, group in connection.execute(
        select(batches.step, batches.group_id).where(since, batches.group_id.in_(ids)).order_by(batches.step)
    ):
        train_steps[group].append(step)
    return [
        {
            "id": row.id, "group": row.name, "step": row.step, "task": row.task,
            "state": State(row.state).name.lower(), "size": row.size, "newest": row.newest, "oldest": row.oldest,
            "tries": row.tries, "failure": row.failure, "dropped": json.loads(row.dropped) if row.dropped else {},
            "stored": row.id in stored, "train_steps": train_steps[row.id],
        }
        for row in rows
    ]  # fmt: skip
