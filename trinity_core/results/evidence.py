"""The records of a run that `trinity_core.results.doctor` checks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from sqlalchemy import select

from trinity_core.config.findings import value_at
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.database import Database
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics, stream_of
from trinity_core.exchange.tracking.rollouts import read_rollouts, rollout_files
from trinity_core.exchange.tracking.run_record import RunState, read_config, read_record
from trinity_core.exchange.tracking.scores import evaluated_sets, like_the_newest
from trinity_core.results.audit import audit_runs, open_store
from trinity_core.results.data_rows import DataSet, task_sets

BATCHES = 8
"""Train steps whose rows are read, evenly spaced."""

Steps = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Score:
    """An evaluation of one task set; `low` and `high` are the ends of its 95 % interval."""

    step: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class Evidence:
    """Metrics, scores and rows of a run. Each is empty if the run has stored none."""

    trained: Steps = field(default_factory=dict)
    """Train step → the trainer's metrics."""
    explored: Mapping[str, Steps] = field(default_factory=dict)
    """Explorer → explore step → its metrics."""
    scores: Mapping[str, Sequence[Score]] = field(default_factory=dict)
    """Task set → its evaluations, in the order of steps."""
    batches: Mapping[int, Sequence[Experience]] = field(default_factory=dict)
    """Rows of some train steps."""
    contradictions: Sequence[str] = ()
    """What `trinity audit` found."""
    draws: Sequence[str] = ()
    """`<task set>/<row>` of each task in the order in which it was drawn, if the order is that of epochs."""
    eval_prompts: frozenset[str] = frozenset()
    """Prompts of sampled answers of evaluations."""
    totals: Mapping[int, int] = field(default_factory=dict)
    """Train step → length of the run at that time."""
    updates: Mapping[int, int] = field(default_factory=dict)
    """Train step → updates of the policy up to it, by the optimizer's own count."""
    skipped: Sequence[str] = ()
    """Explore steps whose position in the task sets moved further than by the tasks that they drew."""
    other_template: str = ""
    """The model that this run began with, if that was trained here with another chat template."""
    failure: str | None = None
    """Why the run failed, empty if that is not recorded; None if it has not failed."""
    starts_from_adapter: bool = False
    """True if the run began with a trained adapter, without which the policy is its reference."""
    folder: str = "."
    """The run's folder, quoted for a shell."""

    @property
    def rows(self) -> list[Experience]:
        return [row for batch in self.batches.values() for row in batch]

    def groups(self) -> Iterator[list[Experience]]:
        """Yield the rewarded rollouts of each group in `batches`."""
        for rows in self.batches.values():
            groups: dict[str, list[Experience]] = {}
            for row in rows:
                if row.reward is not None and not row.is_expert:
                    groups.setdefault(row.group, []).append(row)
            yield from groups.values()

    @property
    def distances(self) -> dict[int, float]:
        """Train step → the most that the mean of a reward between 0 and 1 can differ from the reference model's, by
        Pinsker's inequality: √(KL of an answer / 2). Only steps with a KL loss."""
        kl, length = "actor/kl_mean", "response_length/mean"  # nats a token; tokens
        return {
            step: (abs(metrics[kl]) * metrics[length] / 2) ** 0.5
            for step, metrics in sorted(self.trained.items())
            if kl in metrics and length in metrics
        }

    @property
    def is_solved(self) -> bool:
        """True if the latest score of every evaluation is nearly perfect."""
        return bool(self.scores) and all(scores[-1].accuracy >= 0.95 for scores in self.scores.values())


def gather(folder: Path, store: str | None, audited: bool = True) -> Evidence:
    """Read what the run in `folder` has stored; `store` is the URL of its experiences, None without any.

    `audited`: also account for every task, which reads all rows.
    """
    lines = read_metrics(folder)
    train_lines = [line for line in lines if stream_of(line.source) == "trainer"]
    trained = {line.step: line.metrics for line in train_lines}
    explored: dict[str, dict[int, dict[str, float]]] = {}
    for line in lines:
        if stream_of(line.source) == "explorer":
            explored.setdefault(line.source, {})[line.step] = line.metrics
    evaluated = {
        rollout.prompt
        for source, _, file in rollout_files(folder)
        if stream_of(source) == "eval"
        for rollout in read_rollouts(file)
    }
    settings, record = read_config(folder), read_record(folder)
    evidence = Evidence(
        trained, explored, _scores(lines), eval_prompts=frozenset(evaluated),
        totals={line.step: line.total_steps for line in train_lines if line.total_steps is not None},
        updates={line.step: line.updates for line in train_lines if line.updates is not None},
        other_template=_other_template(settings),
        failure=record.error if record is not None and record.present_state is RunState.FAILED else None,
        starts_from_adapter=bool(value_at(settings, "model.lora_configs[0].path")),
        folder=quote(str(folder)),
    )  # fmt: skip
    if store is None:
        return evidence
    database = open_store(folder, store)
    with ExperienceStore(database) as opened:
        batches = {step: rows for step in _spread(sorted(trained)) if (rows := opened.batch(step))}
        draws, skipped = _draws(database, explored, task_sets(folder).values()), _skipped(database)
    problems = (
        [problem for audit in audit_runs(folder, url=store).values() for problem in audit.problems] if audited else []
    )
    return replace(evidence, batches=batches, contradictions=problems, draws=draws, skipped=skipped)


def _draws(database: Database, explorers: Collection[str], tasksets: Iterable[DataSet]) -> list[str]:
    """Return the tasks drawn by the run's only explorer; none if its selector draws in another order than epochs."""
    selectors = (taskset.settings.get("task_selector") or {} for taskset in tasksets)
    kinds = {selector.get("selector_type", "sequential") for selector in selectors}
    if len(explorers) != 1 or not kinds <= {"sequential", "shuffle"}:
        return []
    groups = database.tables.groups.c
    query = select(groups.explorer, groups.step, groups.name, groups.task).where(groups.task.is_not(None))
    with database.read() as connection:
        rows = connection.execute(query).all()
    # The ledger lists the tasks of a step by what became of them. A group below a task's own is no task of its own.
    placed = [(row.step, row.name.removeprefix(f"{row.explorer}/{row.step}/"), row.task) for row in rows]
    return [task for *_, task in sorted((step, int(place), task) for step, place, task in placed if place.isdigit())]


def _skipped(database: Database) -> list[str]:
    steps = database.tables.steps.c
    query = select(steps.explorer, steps.step, steps.tasks, steps.position).order_by(steps.explorer, steps.step)
    skipped, drawn_before = [], dict[str, int]()
    with database.read() as connection:
        for explorer, step, tasks, position in connection.execute(query):
            counters = json.loads(position)
            drawn, moved = counters.get("drawn", 0), counters.get("drawn", 0) - drawn_before.get(explorer, 0)
            if moved > tasks and not counters.get("last_from_queues"):  # a resume finds its place in a queue anew
                skipped.append(f"step {step} of {explorer} drew {tasks} tasks and moved on by {moved}")
            drawn_before[explorer] = drawn
    return skipped


def _other_template(settings: Mapping[str, Any]) -> str:
    """Return the model's folder if it is a run's checkpoint, whose tokenizer has the template that it was trained with,
    and another one is configured."""
    model = settings.get("model") or {}
    folder, configured = Path(str(model.get("model_path"))), model.get("custom_chat_template")
    if configured is None and model.get("chat_template_path"):
        configured = _text(Path(model["chat_template_path"]).expanduser())
    trained = _text(folder / "chat_template.jinja") if folder.parts[-2:] == ("actor", "huggingface") else None
    return str(folder) if configured and trained and configured.strip() != trained.strip() else ""


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _scores(lines: Sequence[MetricLine]) -> dict[str, list[Score]]:
    """Return the scores that are comparable with the newest one."""
    scores: dict[str, dict[int, Score]] = {}
    for line in like_the_newest([line for line in lines if stream_of(line.source) == "eval"]):
        for taskset in evaluated_sets(line.metrics):
            accuracy = line.metrics[name := f"eval/{taskset}/accuracy"]
            low, high = (line.metrics.get(f"{name}_{end}", accuracy) for end in ("low", "high"))
            scores.setdefault(taskset, {})[line.step] = Score(line.step, accuracy, low, high)
    return {taskset: [score for _, score in sorted(steps.items())] for taskset, steps in scores.items()}


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `BATCHES` of the steps, evenly spaced, the first and the last among them."""
    return sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(BATCHES, len(steps)))}) if steps else []
