"""The ledger: one row for each task drawn, written with the explore step that drew it, which outlives its rollouts.

The ledger and the queue are the same table, `groups`, so that whatever undoes an explore step or a batch undoes its
entries too. A task's outcome follows from its state and its batches: `audit.py` reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from trinity_core.data.experience import Experience, to_bytes
from trinity_core.store.schema import State, Tables

UNSCORED = "unscored"
"""The rule that drops rows without a verdict: they stay in their group, but carry no loss."""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """The outcome of a task at the time its explore step is stored."""

    group: str
    """The group of its experiences, unique in the run."""
    task: str
    """`<task set>/<row>`."""
    produced: int
    """Experiences its workflow gave."""
    tries: int = 1
    """Attempts at its workflow."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Experiences that each operator dropped, in the order of the operators."""
    failure: str | None = None
    """Why its last attempt failed, any text; None if one succeeded."""


def entries(
    experiences: Sequence[Experience], drawn: Sequence[DrawnTask], explorer: str, step: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Table rows for `groups` and `experiences` of an explore step, with ids from 0 on.

    Groups with experiences come first, in order of first appearance, then the tasks that left none. Experiences without
    a group are groups of one.
    """
    tasks = {task.group: task for task in drawn}
    groups: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for group_id, (name, members) in enumerate(_grouped(experiences)):
        task = tasks.pop(name, None)
        groups.append(_entry(group_id, name, task, members, explorer, step))
        rows.append({"group_id": group_id, "blob": to_bytes(members)})
    for group_id, task in enumerate(tasks.values(), len(groups)):
        groups.append(_entry(group_id, task.group, task, (), explorer, step))
    return groups, rows


def dropped_by(connection: Connection, t: Tables, explorer: str) -> dict[str, int]:
    """Operator or rule -> experiences of this explorer that it dropped, the largest number first."""
    g = t.groups.c
    query = select(g.dropped).where(g.explorer == explorer, g.dropped.is_not(None))
    totals: Counter[str] = Counter()
    for text in connection.scalars(query):
        totals.update(json.loads(text))
    return dict(totals.most_common())


def number(rows: Sequence[dict[str, Any]], key: str, first: int) -> None:
    """Let the ids of these table rows begin at `first` instead of 0."""
    for row in rows:
        row[key] += first


def _entry(
    group_id: int, name: str, task: DrawnTask | None, members: Sequence[Experience], explorer: str, step: int
) -> dict[str, Any]:
    dropped = dict(task.dropped) if task else {}
    if unscored := sum(e.is_unscored for e in members):
        dropped[UNSCORED] = unscored
    failure = _storable(task.failure) if task and task.failure is not None else None
    newest, oldest = _versions(members)
    state = State.READY if members else State.FAILED if failure is not None else State.DROPPED
    return {
        "id": group_id, "explorer": explorer, "step": step, "name": name, "size": len(members),
        "state": int(state), "stale_at": None,
        "newest": newest, "oldest": oldest,
        "task": task.task if task else None, "produced": task.produced if task else len(members),
        "tries": task.tries if task else 1, "dropped": json.dumps(dropped) if dropped else None, "failure": failure,
    }  # fmt: skip


def _storable(text: str) -> str:
    """`text` with `?` for what databases refuse: half a surrogate pair is no UTF-8, and PostgreSQL takes no NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _grouped(experiences: Sequence[Experience]) -> list[tuple[str, list[Experience]]]:
    """Groups in order of first appearance; experiences without a group are groups of one."""
    groups: dict[object, tuple[str, list[Experience]]] = {}
    for i, experience in enumerate(experiences):
        groups.setdefault(experience.group or i, (experience.group, []))[1].append(experience)
    return list(groups.values())


def _versions(members: Sequence[Experience]) -> tuple[int, int]:
    """The newest and the oldest version that sampled a token of these; -1 if none did."""
    arrays = [experience.versions for experience in members if experience.versions is not None]
    versions = arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    newest = int(versions.max(initial=-1))
    oldest = int(versions.min(initial=newest))
    return newest, oldest if oldest >= 0 or newest < 0 else int(versions[versions >= 0].min())
