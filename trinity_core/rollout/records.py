"""Records of an explorer's steps: metrics, sampled rollouts, ledger entries, JSON lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from trinity_core.base.timing import StepTimer
from trinity_core.config import Config
from trinity_core.config.paths import explored_file, operator_input_file
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.archive import Archive, lines_of, whole_line
from trinity_core.exchange.store.ledger import DrawnTask
from trinity_core.exchange.store.run_store import file_owner
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.tracking.answers import TaskAnswers, save_answers
from trinity_core.exchange.tracking.metrics_file import explorer_source
from trinity_core.exchange.tracking.progress import LoggedMetrics
from trinity_core.exchange.tracking.rollouts import SampledRollout, save_rollouts, traces_dir
from trinity_core.rollout.inference.requests import WeightSyncReport
from trinity_core.rollout.metrics import experiences_of, task_answers
from trinity_core.rollout.runner import Outcome, cause

SAMPLED = 16
"""Number of rollouts written for people to read, in a sampled step."""
SAMPLE_EVERY = 10
"""Explore steps between two samples; every evaluation is sampled."""
GAP = "weight_sync/check_gap"
LONGEST_CAUSE = 300
"""Length limit of a failure's cause, in characters."""


@dataclass
class StepRollouts:
    step: int
    experiences: list[Experience]
    """Experiences that the operators kept."""
    inputs: list[Experience]
    """Experiences before the operators."""
    drawn: list[DrawnTask]
    numbers: dict[str, float]
    began: float = field(default_factory=time.perf_counter)
    spans: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    """Group -> `Outcome.span` of its task."""


class StepRecords:
    def __init__(self, config: Config) -> None:
        self.last: dict[str, float] = {}
        self._job_dir = config.job_dir
        self._source = explorer_source(config.explorer.name)
        self._traced = config.monitor.traces_per_step if config.monitor.monitor_type == "mlflow" else 0
        self._timer = StepTimer()
        self._answered: dict[str, tuple[list[TaskAnswers], list[Experience]]] = {}
        self._gaps: list[float] = []
        """Gaps of the weight checks since the last step."""

    @cached_property
    def _metrics(self) -> LoggedMetrics:
        return LoggedMetrics(self._job_dir, self._source)

    def spent(self, activity: str) -> AbstractContextManager[None]:
        """Add the time within this context to `timing_s/<activity>` of the step in progress."""
        return self._timer.part(activity)

    def set_seconds(self, **activities: float) -> None:
        self._timer.seconds |= {f"timing_s/{name}": seconds for name, seconds in activities.items()}

    def loaded(self, done: WeightSyncReport) -> None:
        """Record what the engines report about a load and its weight check; a step may have several."""
        self._timer.add("weight_sync_engine", done.seconds)
        self._timer.add("weight_check", done.check_seconds)
        if done.gap is not None:
            self._gaps.append(done.gap)

    def numbers(self, rollouts: StepRollouts, engine_restarts: int) -> dict[str, float]:
        """Return the metrics of a step, without those of storing it."""
        if self._gaps:
            self.last[GAP], self._gaps = max(self._gaps), []
        gap = {name: value for name, value in self.last.items() if name == GAP}
        return rollouts.numbers | gap | self._timer.seconds | {"engine_restarts": float(engine_restarts)}

    def write(self, rollouts: StepRollouts, numbers: Mapping[str, float], total_steps: int | None = None) -> None:
        """Write the `numbers` of a step, of so many, with the seconds of each activity, and every few steps a sample of
        rollouts."""
        seconds, self._timer = self._timer.seconds, StepTimer()
        waited = sum(seconds.get(f"timing_s/{name}", 0.0) for name in ("wait", "sleep", "wake", "weight_sync"))
        seconds["timing_s/step"] = time.perf_counter() - rollouts.began + waited
        self.last = {**numbers, **seconds}
        self.last["experiences_per_second"] = rollouts.numbers["experiences/kept"] / seconds["timing_s/step"]
        self._metrics.write(rollouts.step, self.last, total_steps=total_steps)
        if self._traced:
            sample = _spread(rollouts.experiences, self._traced)
            traced = [SampledRollout.of(experience, rollouts.spans.get(experience.group)) for experience in sample]
            save_rollouts(self._job_dir, self._source, rollouts.step, traced, traces_dir(self._job_dir))
        if rollouts.step % SAMPLE_EVERY == 1:
            tasks = {drawn.group: drawn.task for drawn in rollouts.drawn}
            self.sample(self._source, rollouts.step, rollouts.experiences, tasks)

    def restore(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the `numbers` of a stored step whose process died before it wrote them."""
        if not self._metrics.has(step):
            self._metrics.write(step, numbers)

    def answered(self, taskset: str, outcomes: Sequence[Outcome]) -> None:
        """Keep what `save_evaluation` saves of the answers to an eval set."""
        self._answered[taskset] = task_answers(outcomes), _spread(experiences_of(outcomes), SAMPLED)

    def save_evaluation(self, version: int) -> None:
        """Save the answers of an evaluation, and a sample of them as rollouts."""
        for taskset, (answers, rollouts) in self._answered.items():
            save_answers(self._job_dir, taskset, version, answers)
            self.sample(f"eval_{taskset}", version, rollouts)
        self._answered = {}

    def sample(self, source: str, step: int, rows: list[Experience], tasks: Mapping[str, str] | None = None) -> None:
        """Save an evenly spaced sample of these rollouts. `tasks`: group -> name of its task."""
        names = tasks or {}
        sample = [replace(SampledRollout.of(row), task=names.get(row.group) or "") for row in _spread(rows, SAMPLED)]
        save_rollouts(self._job_dir, source, step, sample)


def _spread(experiences: list[Experience], count: int) -> list[Experience]:
    total, count = len(experiences), min(count, len(experiences))
    return [experiences[index * total // count] for index in range(count)]


def drawn_tasks(outcomes: Sequence[Outcome], dropped: Mapping[str, Mapping[str, int]]) -> list[DrawnTask]:
    """Return the entries of a step's tasks, in order: one for each of a task's groups.

    `dropped`: group -> operator -> number of experiences.
    """
    return [
        DrawnTask(
            group=group,
            task=f"{outcome.task.taskset}/{outcome.task.index}",
            produced=produced,
            tries=outcome.retries + 1,
            dropped=dropped.get(group, {}),
            failure=_failure(outcome, produced),
        )
        for outcome in outcomes
        for group, produced in _produced(outcome).items()
    ]


def _produced(outcome: Outcome) -> dict[str, int]:
    """Return the number of experiences in the task's own group, and in each group below it."""
    further = outcome.further_groups
    counts = Counter(experience.group for experience in outcome.experiences if experience.group in further)
    return {outcome.task.group: len(outcome.experiences) - counts.total(), **counts}


def _failure(outcome: Outcome, produced: int) -> str | None:
    """Return why a group of a task has no experience; None if it has some."""
    if outcome.failed:
        return " ".join(cause(outcome.error).split())[:LONGEST_CAUSE]
    return None if produced or outcome.dropped else "its workflow returned no experience"


class OperatorInput:
    """The file of operator inputs of one explorer. A step is written before it is stored, and cut off if storing
    fails."""

    def __init__(self, config: Config) -> None:
        path = operator_input_file(config)
        self._archive = Archive(path, whole_line, file_owner(config, path)) if path else None

    def resume(self, step: int) -> None:
        """Cut the file after `step`, the last stored one."""
        if self._archive is not None:
            self._archive.rewind(step)

    def append(self, step: int, experiences: Sequence[Experience]) -> None:
        if self._archive is not None:
            self._archive.extend(step, lambda number: experiences if number == step else ())


class ExploredFile:
    """The file of stored experiences of one explorer. Lines are read back from the store, so that they match it."""

    def __init__(self, config: Config, store: ExperienceStore) -> None:
        path = explored_file(config)
        self._archive = Archive(path, whole_line, file_owner(config, path)) if path else None
        self._explored = partial(store.explored, config.explorer.name)

    def resume(self, step: int) -> None:
        """Make the file hold exactly the explore steps up to `step`."""
        if self._archive is not None:
            self._archive.rewind(step)
            if len(lines_of(self._archive.path, step)) < len(self._explored(step)):  # killed while it wrote them
                self._archive.rewind(step - 1)
            self.stored(step)

    def stored(self, step: int) -> None:
        if self._archive is not None:
            self._archive.extend(step, self._explored)
