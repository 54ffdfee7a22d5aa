"""How many rows of which state the store holds, and how far trainer and explorers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from trinity_core.store import presence
from trinity_core.store.schema import State, Tables, kept


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
    by_state = select(g.state, func.count(), func.sum(g.size), func.min(g.oldest)).where(
        kept(t), g.state <= State.STALE
    )
    by_state = by_state.where(kept(t), g.state <= State.STALE).group_by(g.state)
    counts = {row[0]: row for row in connection.execute(by_state)}
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    leased_step = connection.execute(select(func.max(t.leases.c.step))).scalar() or 0
    rows = {state: int(counts[state][2]) if state in counts else 0 for state in State}
    ready = counts.get(State.READY)
    return Stats(
        ready=rows[State.READY], leased=rows[State.LEASED], trained=rows[State.TRAINED], stale=rows[State.STALE],
        ready_groups=ready[1] if ready else 0, oldest_ready_version=ready[3] if ready else None,
        lineage=meta.lineage, committed=meta.committed, leased_step=leased_step, now=now,
        explorers=presence.explorers(connection, t),
    )  # fmt: skip
