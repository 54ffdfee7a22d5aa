"""The store's tables, the same for SQLite and PostgreSQL.

A *group* (the rollouts of one task in one explore step) is the unit of everything: it is put, leased, returned and
pruned whole. Ids are given out under the store's one write lock, so ascending id is the order of insertion.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

SCHEMA_VERSION = 2
Id = BigInteger().with_variant(Integer, "sqlite")


class State(IntEnum):
    """Where a group stands. READY → LEASED (a trainer step has it) → TRAINED (a checkpoint contains that step)."""

    READY = 0
    LEASED = 1
    TRAINED = 2
    STALE = 3
    """Too old for the sampling strategy when it was looked at; counted, never trained on."""


@dataclass(frozen=True)
class Tables:
    """The tables of one run; `prefix` keeps the runs of one database apart."""

    metadata: MetaData
    meta: Table
    """One row. Every writer changes `clock` first: that is the write lock, and what waiting readers watch."""
    explorers: Table
    steps: Table
    """One row for each explore step that was put: the explorer's position after it."""
    groups: Table
    experiences: Table
    """The rows of each group, packed; apart from `groups`, so that looking for a batch reads little."""
    leases: Table
    """One row for each trainer step that took a batch, empty batches included."""
    lease_groups: Table


def tables(namespace: str) -> Tables:
    """The tables of the run `namespace` (any string)."""
    prefix = "t" + hashlib.sha256(namespace.encode()).hexdigest()[:10] + "_"
    m = MetaData()
    meta = Table(
        prefix + "meta", m, Column("id", Integer, primary_key=True, autoincrement=False),
        Column("namespace", Text), Column("schema", Integer), Column("clock", Id), Column("lineage", Integer),
        Column("committed", Integer), Column("next_group", Id),
    )  # fmt: skip
    explorers = Table(
        prefix + "explorers", m, Column("name", String(200), primary_key=True), Column("waiting", Integer),
        Column("finished", Boolean, nullable=False, default=False),
    )  # fmt: skip
    steps = Table(
        prefix + "steps", m, Column("explorer", String(200), primary_key=True),
        Column("step", Integer, primary_key=True, autoincrement=False), Column("version", Integer, nullable=False),
        Column("position", Text, nullable=False), Column("rows", Integer, nullable=False),
    )  # fmt: skip
    groups = Table(
        prefix + "groups", m, Column("id", Id, primary_key=True, autoincrement=False),
        Column("explorer", String(200), nullable=False), Column("step", Integer, nullable=False),
        Column("name", Text, nullable=False), Column("size", Integer, nullable=False),
        Column("newest", Integer, nullable=False), Column("oldest", Integer, nullable=False),
        Column("state", Integer, nullable=False), Column("aside_at", Integer, key="stale_at"),
    )  # fmt: skip
    Index(prefix + "groups_by_state", groups.c.state, groups.c.id)
    Index(prefix + "groups_by_step", groups.c.explorer, groups.c.step)
    experiences = Table(
        prefix + "experiences", m, Column("group_id", Id, primary_key=True, autoincrement=False),
        Column("blob", LargeBinary, nullable=False),
    )  # fmt: skip
    leases = Table(
        prefix + "leases", m, Column("step", Integer, primary_key=True, autoincrement=False),
        Column("rows", Integer, nullable=False), Column("at", Double, nullable=False), Column("expert", Text),
    )  # fmt: skip
    lease_groups = Table(
        prefix + "lease_groups", m, Column("step", Integer, primary_key=True, autoincrement=False),
        Column("ordinal", Integer, primary_key=True, autoincrement=False), Column("group_id", Id, nullable=False),
    )  # fmt: skip
    Index(prefix + "lease_groups_by_group", lease_groups.c.group_id)
    return Tables(m, meta, explorers, steps, groups, experiences, leases, lease_groups)
