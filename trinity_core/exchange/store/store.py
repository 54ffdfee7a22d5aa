"""The durable queue between explorers and trainer, described in `docs/store.md`.

Invariants, for any order in which explorers and trainer start, stop and crash:

- Nothing is lost: an explore step's rows and the explorer's position after it are stored in one transaction.
- Nothing is stored twice: a step that was already put is ignored.
- Within a lineage no row is in two batches (unless reuse is configured), and a trainer step always gets the same batch.
- A batch consists of whole groups, in order of insertion by default.
- After `rewind(c)` the store is as if nothing had happened after checkpoint c.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select, update

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.data.lengths import split_rows
from trinity_core.exchange.store import leasing, ledger, members
from trinity_core.exchange.store.database import Database, Unchanged, again_if_away, waits_for_room
from trinity_core.exchange.store.expert import ExpertSource
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.members import Contribution, Stats
from trinity_core.exchange.store.presence import (
    TrainerPresence,
    all_have_finished,
    begun_by_others,
    nothing_more_comes,
    rows_of_earlier,
)
from trinity_core.exchange.store.schema import EXPLORER, REWIND, TRAINER, TURN, statements, tables
from trinity_core.exchange.store.strategies import Fifo, Strategy, first_explore_step

log = logging.getLogger(__name__)

UNDONE = (
    "explorer %s had finished, but the run goes back to step %d, and its steps from %d on are undone: it must run "
    "again. If it was started by a command or deployment of its own, start it again"
)
LOST = (
    "the run goes back to step %d, and the store keeps the rows of the newest checkpoints only "
    "(trainer.max_checkpoints_to_keep): %d rows that later steps trained on are deleted, and their tasks are not drawn "
    "again; `trinity audit` names them"
)
Awaited = Callable[[int, int, int, int, list[tuple[int, int]], list[int]], int | None]
"""(version, rows of a step, newest leased train step, ready rows, other explorers' (rows, version)) → version."""


class LineageChanged(TransientFault):
    """The store was rewound under a running explorer, which must start over from `position()` and reload weights."""


@dataclass(frozen=True)
class Position:
    step: int
    """The last explore step that was put; 0: none."""
    position: dict[str, Any] | None
    """The task-set position stored with that step."""
    lineage: int
    """Incremented by every rewind that undid something."""


class ExperienceStore:
    """The store of one run. Several processes may use it; each must open it itself, after any fork."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables
        self._lineages: dict[str, int] = {}

    @classmethod
    def open(cls, url: str | Path, namespace: str = "", patience: float | None = None) -> ExperienceStore:
        """Open or create the store at a SQLAlchemy `url` (or the path of a SQLite file).

        `namespace` separates runs that share a database; `open_run_store` knows a run's namespace. `patience` as in
        `StoreBackend`.
        """
        if isinstance(url, Path) or "://" not in url:
            url = f"sqlite:///{url}"
        return cls(Database(url, tables(namespace), namespace, patience=patience))

    def close(self) -> None:
        self._database.close()

    @property
    def identity(self) -> str:
        return self._database.identity

    def __enter__(self) -> ExperienceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- explorers ----

    @waits_for_room
    def position(self, explorer: str) -> Position:
        """Return the position at which `explorer` resumes in the current lineage. Call it before loading weights."""
        t = self._tables
        query = select(t.steps.c.step, t.steps.c.position).where(t.steps.c.explorer == explorer)
        with self._database.write() as connection:
            self._set_explorer(connection, explorer, waiting=None, finished=False)
            members.end_turn(connection, t, explorer)
            now = connection.execute(select(t.meta.c.lineage)).scalar_one()
            row = connection.execute(query.order_by(t.steps.c.step.desc()).limit(1)).one_or_none()
        self._lineages[explorer] = now
        return Position(row.step, json.loads(row.position), now) if row else Position(0, None, now)

    @again_if_away
    def positions(self, explorer: str) -> list[dict[str, Any]]:
        """Return the positions stored with all explore steps of `explorer` in the current lineage, in order."""
        t = self._tables
        query = select(t.steps.c.position).where(t.steps.c.explorer == explorer).order_by(t.steps.c.step)
        with self._database.read() as connection:
            return [json.loads(position) for position in connection.scalars(query)]

    @again_if_away
    def lineage(self) -> int:
        """Return the current lineage. A waiting explorer polls it and starts over if it changes."""
        with self._database.read() as connection:
            return int(connection.execute(select(self._tables.meta.c.lineage)).scalar_one())

    @waits_for_room
    def put(
        self, explorer: str, step: int, position: dict[str, Any], experiences: Sequence[Experience],
        newest_version: int, waits_for: int | None = None, drawn: Sequence[DrawnTask] = (),
    ) -> bool:  # fmt: skip
        """Store the experiences of explore step `step` (from 1, without gaps) of `explorer`, and its position after it.

        `newest_version` is the newest weight version used in the step; `waits_for` is the version that the next step
        needs, if any. Rows with the same `group` stay together; rows without one are groups of one. `drawn` lists the
        step's tasks for the ledger. Returns False, without changes, if the step was already stored. Raises
        LineageChanged if the store was rewound since `position()`.
        """
        sql = statements(self._tables)
        groups, members = ledger.entries(experiences, drawn, explorer, step)
        record = {"position": json.dumps(position), "rows": len(experiences), "tasks": len(drawn)}
        with self._database.write() as connection:
            now, last_group = sql.numbers.run(connection).fetchone()
            *state, done, newest = sql.explorer.run(connection, key=explorer).fetchone() or [None] * 5
            done, newest, last_group = done or 0, newest or 0, last_group or 0
            if self._lineages.setdefault(explorer, now) != now or step > done + 1:
                raise LineageChanged(
                    f"explore step {step} of {explorer} belongs to an abandoned lineage (the store is at step {done}): "
                    "start over from the stored position"
                )
            if step <= done:
                raise Unchanged
            version = max(newest_version, newest, *(group["newest"] for group in groups))
            sql.add_step.run(connection, explorer=explorer, step=step, version=version, **record)
            if groups:
                ledger.number(groups, "id", last_group + 1)
                sql.add_groups.run_many(connection, groups)
            if members:
                ledger.number(members, "group_id", last_group + 1)
                sql.add_experiences.run_many(connection, members)
            if state != [waits_for, False, None]:
                self._set_explorer(connection, explorer, waiting=waits_for, finished=False)
            return True
        return False  # Unchanged

    @again_if_away
    def explored(self, explorer: str, step: int) -> list[Experience]:
        """Return the experiences of an explore step, unless they were pruned."""
        g, e = self._tables.groups.c, self._tables.experiences
        query = select(e.c.blob).join(self._tables.groups, g.id == e.c.group_id)
        with self._database.read() as connection:
            blobs = connection.scalars(query.where(g.explorer == explorer, g.step == step).order_by(g.id)).all()
        return [experience for blob in blobs for experience in from_bytes(blob)]

    @waits_for_room
    def expect(self, explorer: str) -> None:
        """Record that `explorer` will be started (again): it is waited for, even if it had finished or left."""
        with self._database.write() as connection:
            self._set_explorer(connection, explorer, waiting=None, finished=False)
            members.note(connection, self._tables, EXPLORER, explorer, left=False)

    @waits_for_room
    def join(self, explorer: str, total_steps: int | None, length: int | None = None) -> bool:
        """Record that `explorer` begins, with its total number of steps. Return True if its rollouts would not be
        trained on.

        That is so if the trainer has finished, and the run's `length` (by default these steps) is no greater than it
        was for this explorer while the trainer was active. If it is greater, a trainer with more steps is also
        expected.
        """
        with self._database.write() as connection:
            now = self._database.now(connection)
            return members.join_explorer(connection, self._tables, explorer, total_steps, length or total_steps, now)

    @waits_for_room
    def mark_waiting(self, explorer: str, version: int | None) -> None:
        """Record that `explorer` waits for weight version `version` before its next put (None: it no longer waits).

        Raises LineageChanged if the store was rewound since `position()`: an explorer may briefly outlive its killed
        run, and must not make the next run's trainer believe that no more rows come.
        """
        with self._database.write() as connection:
            self._check_lineage(connection, explorer)
            self._set_explorer(connection, explorer, waiting=version, finished=False)

    @waits_for_room
    def admit(
        self, explorer: str, rows: int, version: int, awaited: Awaited, now: float | None = None
    ) -> tuple[int | None, int]:
        """Let `explorer` begin a step of about `rows` rows with weights of `version` or newer, unless it must wait.

        `awaited(version, rows, leased, ready, begun, earlier)` returns the version it must wait for, if any, as
        `config.sync_schedule.StalenessBound` does. That version is recorded and returned, with the newest train step
        that has a batch. If it is None, the step counts as begun until it is put, or until its explorer starts over or
        is not seen for `LOST_SECONDS`. Raises LineageChanged as `mark_waiting` does.
        """
        needed, leased = None, 0
        with self._database.write() as connection:
            now = self._database.now(connection) if now is None else now
            self._check_lineage(connection, explorer)
            explorers = members.explorers(connection, self._tables)
            leased = members.newest_leased(connection, self._tables)
            ready = members.untrained_rows(connection, self._tables)
            turns = members.turns(connection, self._tables)
            earlier = rows_of_earlier(turns, explorers, explorer, now)
            needed = awaited(version, rows, leased, ready, begun_by_others(explorers, explorer, now), earlier)
            if needed is None:
                members.end_turn(connection, self._tables, explorer)
            elif explorer not in turns:
                members.note(connection, self._tables, TURN, explorer, seen=now, total=rows)
            elif explorer in explorers and needed == explorers[explorer].waiting:
                raise Unchanged
            step = {"begun_rows": rows, "begun_version": version} if needed is None else {"begun_rows": 0}
            self._set_explorer(connection, explorer, waiting=needed, finished=False, **step)
        return needed, leased

    def watching(self) -> AbstractContextManager[Callable[[], int]]:
        """Yield a function whose number changes with every commit by others: a cheap way to poll the store."""
        return self._database.watching()

    @waits_for_room
    def mark_finished(self, explorer: str) -> None:
        """Record that `explorer` has finished and puts nothing more. Raises LineageChanged as `mark_waiting` does."""
        with self._database.write() as connection:
            self._check_lineage(connection, explorer)
            self._set_explorer(connection, explorer, waiting=None, finished=True)

    @waits_for_room
    def leave(self, explorer: str) -> None:
        """Record that `explorer` ends before its last step and may come back: others do not wait for it."""
        with self._database.write() as connection:
            members.note(connection, self._tables, EXPLORER, explorer, left=True)

    def _check_lineage(self, connection: Any, explorer: str) -> None:
        now = connection.execute(select(self._tables.meta.c.lineage)).scalar_one()
        if self._lineages.setdefault(explorer, now) != now:
            raise LineageChanged(f"{explorer} belongs to an abandoned lineage: start over from the stored position")

    def _set_explorer(self, connection: Any, explorer: str, **values: Any) -> None:
        """Update an explorer's row. A step that it had begun no longer counts, unless `values` include it."""
        e, values = self._tables.explorers, {"begun_rows": None, "begun_version": None} | values
        if "waiting" in values:
            result = statements(self._tables).set_explorer.run(connection, key=explorer, **values)
        else:
            result = connection.execute(update(e).where(e.c.name == explorer).values(**values))
        if not result.rowcount:
            connection.execute(insert(e).values(name=explorer, **values))

    # ---- trainer ----

    @waits_for_room
    def expect_trainer(self, expected: bool = True) -> None:
        """Record that the trainer will be started again: it does not count as finished before it has begun.

        With `expected=False`, withdraw that, because the start failed.
        """
        p = self._tables.presence
        with self._database.write() as connection:
            connection.execute(update(p).where(p.c.role == TRAINER).values(expected=expected))

    @waits_for_room
    def mark_ended(self, trainer: str) -> None:
        """Record that the trainer ends before its last step, because no more experiences come."""
        with self._database.write() as connection:
            members.note(connection, self._tables, TRAINER, trainer, left=True)

    @waits_for_room
    def begin(self, trainer: str, total_steps: int) -> None:
        """Record that the trainer begins, with its total number of steps. Call this after `rewind`.

        If there are more steps than before, finished explorers count as unfinished until they report again, unless they
        have already begun with more steps.
        """
        with self._database.write() as connection:
            members.begin_trainer(connection, self._tables, trainer, total_steps, self._database.now(connection))

    @waits_for_room
    def lease(
        self, step: int, rows: int, newest_version: int, strategy: Strategy | None = None,
        expert: ExpertSource | None = None, final: bool = False, now: float | None = None,
        whole_step: bool = False,
    ) -> list[Experience] | None:  # fmt: skip
        """Return the batch of trainer step `step`: at least `rows` rows in whole groups; None: wait for more.

        With `whole_step`, it is the groups of the next explore step instead, whatever their number of rows.

        The batch is recorded, and the same step always gets the same one. It is short (or empty: the trainer then makes
        an empty step) only when every explorer has finished or waits for a version newer than `newest_version`, the
        trainer's own; or with `final`, which takes the available rows. With `expert`, the strategy's expert share of
        the rows comes from there, unless there is no rollout at all. Raises TrinityError for a step before the last
        checkpoint, or if rows come from a newer policy than the trainer's.
        """
        strategy, t = strategy or Fifo(), self._tables
        rollout_rows, experts = split_rows(rows, strategy.expert_ratio if expert else 0.0)
        with self._database.write() as connection:
            committed, rows_before, experts_before = statements(t).lease.run(connection, key=step).fetchone()
            if rows_before is not None:
                return leasing.leased_batch(connection, t, step, expert, experts_before)
            if step <= committed:
                raise TrinityError(f"trainer step {step} lies before checkpoint {committed}: rewind the store first")
            now = self._database.now(connection) if now is None else now
            if strategy.favours_newer:
                leasing.mark_displaced(connection, t, step)
            most = leasing.EVERY_ROW if whole_step else rollout_rows
            groups = leasing.candidates(connection, t, strategy, most, now, step)
            choice = strategy.choose(groups, most, newest_version)
            full = choice.rows >= rollout_rows
            if whole_step:
                choice = replace(choice, take=first_explore_step(choice.take))
                full = bool(choice.take)
            leasing.check_lineage(choice.take, newest_version)
            leasing.mark_stale(connection, t, choice.stale, step)
            enough = full or final or nothing_more_comes(members.explorers(connection, t), newest_version, now)
            if not enough and not choice.stale:
                raise Unchanged
            if not enough:
                return None
            record: str | None = None
            expert_experiences: list[Experience] = []
            if expert and experts and choice.take:
                before = leasing.expert_position(connection, t, step)
                expert_experiences, after = expert.take(experts, before)
                record = json.dumps({"rows": experts, "before": before, "after": after})
            leasing.record_lease(connection, t, step, choice, now, record, strategy.cooldown is not None)
            return leasing.leased_experiences(connection, t, step) + expert_experiences
        return None  # Unchanged

    @again_if_away
    def has_rows_for(self, step: int, strategy: Strategy | None = None) -> bool:
        """True if there are rollouts, new or used, that `strategy` may choose for trainer step `step` now."""
        with self._database.read() as connection:
            now = self._database.now(connection)
            return bool(leasing.candidates(connection, self._tables, strategy or Fifo(), 1, now, step))

    @again_if_away
    def batch(self, step: int) -> list[Experience]:
        """Return the rollouts that trainer step `step` was given; empty if there was no such step or it was pruned."""
        with self._database.read() as connection:
            return leasing.leased_experiences(connection, self._tables, step)

    @again_if_away
    def whole_batch(self, step: int, expert: ExpertSource | None = None) -> list[Experience] | None:
        """Return what `lease` gave trainer step `step`; None if it gave nothing or if some of it was pruned."""
        with self._database.read() as connection:
            _, rows, experts = statements(self._tables).lease.run(connection, key=step).fetchone()
            if rows is None or len(leasing.leased_experiences(connection, self._tables, step)) != rows:
                return None
            return leasing.leased_batch(connection, self._tables, step, expert, experts)

    @waits_for_room
    def flush(self) -> None:
        """Return when everything written so far survives a power cut. Call before a checkpoint gets its final name."""
        self._database.flush()

    @waits_for_room
    def commit(self, step: int) -> None:
        """Make the batches up to trainer step `step` final: its checkpoint is complete."""
        with self._database.write() as connection:
            leasing.mark_trained(connection, self._tables, step)

    @waits_for_room
    def rewind(self, step: int) -> int:
        """Rewind to checkpoint `step` (0: the beginning). A trainer must call this first.

        Changes nothing if nothing happened after it. Delete newer weights first (`WeightVersions.rewind`), so that an
        explorer that notices the rewind finds none. Returns the number of rows in later batches that were pruned and
        are not sampled again, and logs a warning: a rewind is exact only to the step of the last `prune` or later.
        """
        with self._database.write() as connection:
            lost, undone = leasing.rewind(connection, self._tables, step)
        if lost:
            log.warning(LOST, step, lost)
        for explorer, begin in undone.items():
            log.warning(UNDONE, explorer, step, begin)
        return lost

    @waits_for_room
    def prune(self, step: int, strategy: Strategy | None = None) -> int:
        """Delete the rows of final batches up to `step`, the oldest step that an exact rewind may go back to. Return
        their number.

        Rows that `strategy` may take again stay.
        """
        with self._database.write() as connection:
            return leasing.prune(connection, self._tables, step, strategy or Fifo())

    # ---- both ----

    @again_if_away
    def mark_seen(self, role: str, name: str) -> None:
        """Record that the explorer or trainer (`role`) of that name is alive."""
        with self._database.write() as connection:
            members.note(connection, self._tables, role, name, seen=self._database.now(connection))

    @again_if_away
    def now(self) -> float:
        """Return Unix seconds of the clock that dates the store's records."""
        with self._database.read() as connection:
            return self._database.now(connection)

    @again_if_away
    def trainer(self) -> TrainerPresence:
        """Return the trainer's progress, when it was last seen, whether it has finished, and the current lineage."""
        with self._database.read() as connection:
            return members.trainer_state(connection, self._tables)

    @again_if_away
    def went_back_to(self, since: int) -> int:
        """Return the oldest step that the trainer went back to after lineage `since`; its newest checkpoint if an older
        version did not record that."""
        p = self._tables.presence.c
        with self._database.read() as connection:
            rewinds = connection.execute(select(p.name, p.total).where(p.role == REWIND)).all()
            steps = [row.total for row in rewinds if int(row.name) > since]
            return min(steps, default=members.trainer_state(connection, self._tables).committed)

    @again_if_away
    def reaches(self, step: int) -> bool:
        """True if trainer step `step` has had its batch from this store, or its checkpoint is recorded."""
        with self._database.read() as connection:
            return members.newest_leased(connection, self._tables) >= step

    @again_if_away
    def contributions(self, step: int | None = None) -> dict[str, Contribution]:
        """Return explorer → its share in the batch of a train step, or in all batches."""
        with self._database.read() as connection:
            return members.contributions(connection, self._tables, step)

    @again_if_away
    def untrained(self, explorer: str | None = None) -> int:
        """Count the rows in the queue, of all explorers or of one. After the trainer has finished they stay
        untrained."""
        with self._database.read() as connection:
            return members.untrained_rows(connection, self._tables, explorer)

    @again_if_away
    def dropped_by(self, explorer: str) -> dict[str, int]:
        """Return operator or rule → number of this explorer's experiences it dropped, in steps that count."""
        with self._database.read() as connection:
            return ledger.dropped_by(connection, self._tables, explorer)

    @again_if_away
    def awaited(self, version: int) -> bool:
        """True if every explorer has finished or waits for `version` or a newer one, so that none is within a step."""
        with self._database.read() as connection:
            now = self._database.now(connection)
            return nothing_more_comes(members.explorers(connection, self._tables), version - 1, now)

    def exhausted(self) -> bool:
        """True if every explorer has finished and the queue is empty.

        Explorers that left are ignored unless all have.
        """
        stats = self.stats()
        return all_have_finished(stats.explorers) and not stats.ready

    @again_if_away
    def explorer_steps(self) -> dict[str, int]:
        """Return explorer → last step it put. Fast even if the store holds many groups."""
        with self._database.read() as connection:
            return {name: explorer.step for name, explorer in members.explorers(connection, self._tables).items()}

    @again_if_away
    def stats(self) -> Stats:
        with self._database.read() as connection:
            return members.stats_of(connection, self._tables, self._database.now(connection))
