"""The audit of a run's store: the outcome of every task drawn, and every contradiction between independent records.

`read` takes one snapshot of the store; `judge` is a pure function of the snapshot, the archive and the checkpoint's
step. It compares records that are written at different times: explore steps with the tasks and rows in the ledger,
batches with their groups, groups with their experiences, committed batches with archive and checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from trinity_core.data.experience import from_bytes, scalars
from trinity_core.data.session_log import SESSION, answers_in_loss
from trinity_core.exchange.store.archive import whole_lines
from trinity_core.exchange.store.ledger import UNSCORED
from trinity_core.exchange.store.schema import State, Tables

STALE = "stale"
"""Name of the rule that drops groups too old for the sampling strategy."""
WITH_ROWS = (State.READY, State.LEASED, State.TRAINED, State.STALE)
Lines = Mapping[int, Mapping[str, int]]
"""The archive: train step → group → number of lines."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a store without the experiences themselves."""

    lineage: int
    committed: int
    steps: Sequence[Row[Any]]
    groups: Sequence[Row[Any]]
    leases: Mapping[int, Row[Any]]
    batches: Mapping[int, Sequence[int]]
    """Train step → ids of its groups, in order."""
    members: Mapping[int, Counter[str]]
    """Group id → how often each group name occurs in its stored experiences."""
    sampled: Sequence[SampledAnswers] = ()
    """Tokens with a loss in the stored experiences of sessions."""


@dataclass(frozen=True)
class SampledAnswers:
    """An experience of a session: digests of its answers with a loss, and the number of other tokens with a loss."""

    group: str
    session: str
    digests: Sequence[str]
    others: int
    tokens: int


@dataclass
class Audit:
    """Counts of tasks, and the contradictions found. `dropped_by` and `trained_at` also count tasks."""

    tasks_drawn: int = 0
    experiences_produced: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    pending: int = 0
    lost: int = 0
    duplicated: int = 0
    sampled_tokens: int = 0
    """Stored tokens with a loss that were found in the log of a completed session."""
    lineage: int = 0
    checkpoint: int = 0
    dropped_by: Counter[str] = field(default_factory=Counter)
    experiences_dropped_by: Counter[str] = field(default_factory=Counter)
    """Operator or rule → experiences, including those of tasks that kept some."""
    failed_because: Counter[str] = field(default_factory=Counter)
    """Reason, with the number of attempts → tasks."""
    trained_at: Counter[int] = field(default_factory=Counter)
    """Train step → tasks; a task used several times counts at its first step."""
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """True if nothing is lost, nothing was trained twice unless reuse was configured, and all records agree."""
        return not (self.lost or self.duplicated or self.problems)

    def to_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


def read(connection: Connection, t: Tables) -> Snapshot:
    meta = connection.execute(select(t.meta.c.lineage, t.meta.c.committed)).one()
    batches: dict[int, list[int]] = defaultdict(list)
    order = select(t.lease_groups).order_by(t.lease_groups.c.step, t.lease_groups.c.ordinal)
    for row in connection.execute(order):
        batches[row.step].append(row.group_id)
    members: dict[int, Counter[str]] = {}
    sampled: list[SampledAnswers] = []
    for row in connection.execute(select(t.experiences).execution_options(yield_per=64)):
        rows = scalars(row.blob)
        members[row.group_id] = Counter(member["group"] for member in rows)
        if any(SESSION in member["info"] for member in rows):
            sampled += _sampled(row.blob)
    return Snapshot(
        lineage=meta.lineage,
        committed=meta.committed,
        steps=connection.execute(select(t.steps).order_by(t.steps.c.explorer, t.steps.c.step)).all(),
        groups=connection.execute(select(t.groups).order_by(t.groups.c.id)).all(),
        leases={row.step: row for row in connection.execute(select(t.leases))},
        batches=batches,
        members=members,
        sampled=sampled,
    )


def _sampled(blob: bytes) -> list[SampledAnswers]:
    sampled = []
    for experience in from_bytes(blob):
        if SESSION in experience.info and experience.action_mask.any():
            digests, others = answers_in_loss(experience)
            sampled.append(
                SampledAnswers(
                    experience.group, experience.info[SESSION], digests, others, int(experience.action_mask.sum())
                )
            )
    return sampled


def archived(path: Path) -> dict[int, Counter[str]]:
    """Count the complete lines of `buffer/experience_buffer.jsonl`; empty if the file does not exist."""
    lines: dict[int, Counter[str]] = defaultdict(Counter)
    for step, group, _ in whole_lines(path):
        lines[step][group] += 1
    return lines


def judge(
    seen: Snapshot, archive: Lines, before: int, after: int, sessions: Mapping[str, Counter[str]] | None = None
) -> Audit:
    """Return the audit of a store, which may be in use.

    `before` and `after` are the newest complete checkpoint (0: none) before and after `seen` was read. `archive` and
    `sessions` were read after `seen`; `sessions` holds the answer digests of each completed session from the session
    log.
    """
    audit = Audit(lineage=seen.lineage, checkpoint=seen.committed)
    _judge_steps(seen, audit)
    _judge_tasks(seen, audit)
    _judge_batches(seen, audit)
    _judge_experiences(seen, audit)
    _judge_archive(seen, archive, audit)
    _judge_sessions(seen, sessions or {}, audit)
    if seen.committed > after:
        newest = after or "none"
        audit.problems.append(f"the store has checkpoint {seen.committed}, but the newest whole one is {newest}")
    elif before > max(seen.leases, default=0):
        audit.problems.append(f"the store has no batch of the last train steps of checkpoint {before}")
    return audit


def _judge_steps(seen: Snapshot, audit: Audit) -> None:
    """Check that explore steps have no gaps, and the tasks and rows that were counted when they were stored."""
    entries: dict[tuple[str, int], list[Row[Any]]] = defaultdict(list)
    for group in seen.groups:
        entries[group.explorer, group.step].append(group)
    last: dict[str, Row[Any]] = {}
    for step in seen.steps:
        where = f"explore step {step.step} of {step.explorer}"
        previous = last.get(step.explorer)
        for missing in range((previous.step if previous else 0) + 1, step.step):
            audit.problems.append(f"explore step {missing} of {step.explorer} is missing")
            audit.lost += max(0, step.tasks - _tasks(entries.get((step.explorer, missing), ())))
        last[step.explorer] = step
        groups = entries.pop((step.explorer, step.step), [])
        _compare_tasks(where, step, groups, audit)
        stored = sum(group.size for group in groups)
        if stored != step.rows:
            audit.problems.append(f"{where} stored {step.rows} experiences, its groups have {stored}")
        position = json.loads(step.position).get("step", step.step)
        if position != step.step:
            audit.problems.append(f"{where} has the position of step {position}")
    for explorer, number in entries:
        audit.problems.append(f"there are tasks of explore step {number} of {explorer}, which is not recorded")


def _compare_tasks(where: str, step: Row[Any], groups: Sequence[Row[Any]], audit: Audit) -> None:
    audit.tasks_drawn += step.tasks
    repeated = [name for name, times in Counter(g.name for g in groups if g.task is not None).items() if times > 1]
    missing = step.tasks - (_tasks(groups) - len(repeated))
    if missing > 0:
        audit.lost += missing
        audit.problems.append(f"{where} drew {step.tasks} tasks, {missing} of them are not in the ledger")
    for name in repeated:
        audit.duplicated += 1
        audit.problems.append(f"{where} has the task {name} more than once")


def _tasks(groups: Iterable[Row[Any]]) -> int:
    return sum(group.task is not None for group in groups)


def _judge_tasks(seen: Snapshot, audit: Audit) -> None:
    """Count each task as trained, dropped, failed or pending, or else as lost."""
    steps_of: dict[int, list[int]] = defaultdict(list)
    for step, ids in sorted(seen.batches.items()):
        for group_id in ids:
            steps_of[group_id].append(step)
    for group in seen.groups:
        dropped = Counter(json.loads(group.dropped)) if group.dropped else Counter()
        audit.experiences_produced += group.produced
        audit.experiences_dropped_by += dropped
        wrong = _contradiction(group, steps_of.get(group.id, []), seen)
        if wrong:
            audit.problems.append(f"group {group.name} ({group.task or 'added by an operator'}) {wrong}")
        elif group.task is not None:
            _count(group, dropped, steps_of.get(group.id, []), seen.committed, audit)
        if wrong and group.task is not None:
            audit.lost += 1
        again = [step for step in steps_of.get(group.id, [])[1:] if step in seen.leases and not seen.leases[step].reuse]
        if again:
            audit.duplicated += 1
            audit.problems.append(f"group {group.name} is in the batches of steps {steps_of[group.id]}, without reuse")


def _contradiction(group: Row[Any], steps: list[int], seen: Snapshot) -> str:
    """Return why a group's state is impossible, or ""."""
    final = [step for step in steps if step <= seen.committed]
    state = State(group.state)
    if state in (State.FAILED, State.DROPPED) and (steps or group.size):
        return f"is {state.name}, but has experiences"
    if state == State.READY and steps:
        return f"waits for a batch, but that of step {steps[0]} has it"
    if state == State.LEASED and not steps:
        return "is taken from the queue, but no batch has it"
    if state in (State.TRAINED, State.PRUNED) and group.stale_at is None and not final:
        return f"is {state.name}, but no batch of a checkpoint has it"
    if state in WITH_ROWS and group.id not in seen.members:
        return f"is {state.name}, but its experiences are gone"
    return ""


def _count(group: Row[Any], dropped: Counter[str], steps: list[int], committed: int, audit: Audit) -> None:
    final = [step for step in steps if step <= committed]
    if group.state == State.FAILED:
        audit.failed += 1
        audit.failed_because[f"{group.failure} (after {group.tries} tries)"] += 1
    elif group.state == State.DROPPED or dropped[UNSCORED] == group.size or group.stale_at is not None:
        audit.dropped += 1
        rule = STALE if group.stale_at is not None else next(reversed(dropped), "an operator")
        audit.dropped_by[rule] += 1
    elif final:
        audit.trained += 1
        audit.trained_at[final[0]] += 1
    else:
        audit.pending += 1


def _judge_batches(seen: Snapshot, audit: Audit) -> None:
    """Check that batches have no gaps, contain the recorded number of rows, and come from older policies."""
    groups = {group.id: group for group in seen.groups}
    for step in range(1, max([*seen.leases, *seen.batches, seen.committed], default=0) + 1):
        ids = seen.batches.get(step, ())
        if step not in seen.leases:
            audit.problems.append(f"the batch of train step {step} is not recorded")
            continue
        unknown = [group_id for group_id in ids if group_id not in groups]
        if unknown:
            audit.problems.append(f"the batch of train step {step} has groups that are not in the ledger: {unknown}")
        rows = sum(groups[group_id].size for group_id in ids if group_id in groups)
        if rows != seen.leases[step].rows:
            recorded = seen.leases[step].rows
            audit.problems.append(f"the batch of train step {step} had {recorded} experiences, its groups have {rows}")
        for group_id in ids:
            if group_id in groups and groups[group_id].newest >= step:
                name, newest = groups[group_id].name, groups[group_id].newest
                audit.problems.append(f"group {name} of version {newest} is in the batch of the earlier step {step}")


def _judge_experiences(seen: Snapshot, audit: Audit) -> None:
    """Check that each group has the experiences that were put."""
    groups = {group.id: group for group in seen.groups}
    for group_id, counts in seen.members.items():
        group = groups.get(group_id)
        if group is None:
            audit.problems.append(f"there are experiences of {', '.join(counts)}, which is not in the ledger")
        elif counts != Counter({group.name: group.size}):
            audit.problems.append(f"group {group.name} has {group.size} experiences, stored are {dict(counts)}")


def _judge_sessions(seen: Snapshot, sessions: Mapping[str, Counter[str]], audit: Audit) -> None:
    """Check that each token with a loss was sampled, with its log-prob, in a completed session, and each answer used
    once."""
    left = {name: answers.copy() for name, answers in sessions.items()}
    for sample in seen.sampled:
        where = f"an experience of group {sample.group}, of session {sample.session},"
        if sample.session not in left:
            audit.problems.append(f"{where} is stored, but the session has not ended")
            continue
        unknown = 0
        for digest in sample.digests:
            unknown += left[sample.session][digest] <= 0
            left[sample.session][digest] -= 1
        if unknown:
            audit.problems.append(f"{where} has {unknown} answers that the session did not sample, or once only")
        if sample.others:
            audit.problems.append(f"{where} has {sample.others} tokens with a loss outside of answers")
        if not unknown and not sample.others:
            audit.sampled_tokens += sample.tokens


def _judge_archive(seen: Snapshot, archive: Lines, audit: Audit) -> None:
    """Check that each committed batch is in the archive with all its rows."""
    groups = {group.id: group for group in seen.groups}
    for step in range(1, seen.committed + 1):
        expected: Counter[str] = Counter()
        for group_id in seen.batches.get(step, ()):
            if group_id in groups:
                name = groups[group_id].name
                expected[name if name and name not in expected else f"{name}#{group_id}"] += groups[group_id].size
        archived = Counter(archive.get(step, {}))
        if archived != expected:
            parts = [f"{(expected - archived).total()} of the batch's experiences are not in it"] * bool(
                expected - archived
            )
            parts += [f"{(archived - expected).total()} others are"] * bool(archived - expected)
            names = ", ".join(sorted((expected - archived) | (archived - expected))[:3])
            audit.problems.append(f"the archive of train step {step} is another: {' and '.join(parts)} ({names})")
