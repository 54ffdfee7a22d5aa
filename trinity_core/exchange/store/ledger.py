"""The ledger: one row per task drawn, written with its explore step and kept after its rollouts are deleted.

The ledger and the queue are the same table, `groups`, so that undoing an explore step or a batch undoes its ledger
entries too. A task's outcome follows from its state and its batches; `audit.py` derives it.
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
from trinity_core.exchange.store.schema import State, Tables

UNSCORED = "unscored"
"""The rule for rows without a reward: they stay in their group, but have no loss."""


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """The outcome of a task when its explore step is stored."""

    group: str
    """Group name of its experiences, unique in the run."""
    task: str
    """`<task set>/<row>`."""
    produced: int
    tries: int = 1
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of experiences that each operator dropped, in operator order."""
    failure: str | None = None
    """Why the last attempt failed; None if it succeeded."""


def entries(
    experiences: Sequence[Experience], drawn: Sequence[DrawnTask], explorer: str, step: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `groups` and `experiences` for an explore step, with ids from 0 on.

    Groups with experiences come first, in order of first appearance, then tasks without experiences. Experiences
    without a group are groups of one.
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
    """Return operator or rule → number of this explorer's experiences it dropped, in descending order."""
    g = t.groups.c
    query = select(g.dropped).where(g.explorer == explorer, g.dropped.is_not(None))
    totals: Counter[str] = Counter()
    for text in connection.scalars(query):
        totals.update(json.loads(text))
    return dict(totals.most_common())


def number(rows: Sequence[dict[str, Any]], key: str, first: int) -> None:
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
    """Replace by `?` what databases refuse: unpaired surrogates (no UTF-8) and, for PostgreSQL, NUL."""
    return text.encode(errors="replace").decode().replace("\0", "?")


def _grouped(experiences: Sequence[Experience]) -> list[tuple[str, list[Experience]]]:
    """Return groups in order of first appearance; experiences without a group are groups of one."""
    groups: dict[object, tuple[str, list[Experience]]] = {}
    for i, experience in enumerate(experiences):
        groups.setdefault(experience.group or i, (experience.group, []))[1].append(experience)
    return list(groups.values())


def _versions(members: Sequence[Experience]) -> tuple[int, int]:
    """Return the newest and the oldest version that sampled a token of these experiences; -1 if none did."""
    arrays = [experience.versions for experience in members if experience.versions is not None]
    versions = arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    newest = int(versions.max(initial=-1))
    oldest = int(versions.min(initial=newest))
    return newest, oldest if oldest >= 0 or newest < 0 else int(versions[versions >= 0].min())
