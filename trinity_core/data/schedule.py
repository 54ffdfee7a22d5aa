"""Decides which tasks an explore step takes, and from which task set: a state machine that draws and observes, without
a clock.

Its position is stored in the transaction that stores a step's experiences. Most selectors need only the number of tasks
drawn so far. One that learns is rebuilt from what each step observed, which is part of the step's position: so a run
that was killed, or that went back to a checkpoint, draws the same tasks again, and the state of a million rows is never
written.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.config.schema import Config
from trinity_core.data.chat import ChatEncoder
from trinity_core.data.rejected import RejectedRows
from trinity_core.data.selectors import SelectorRows, TaskSelector, make_selector
from trinity_core.data.task import Task
from trinity_core.data.task_queue import QueueTaskset
from trinity_core.data.taskset import PromptCheck, Taskset

Positions = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the positions of all explore steps so far, in order; called only to rebuild learned state."""


class Mixture(Protocol):
    """Decides which task set provides each task."""

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """Return the indices of the task sets of the next `count` tasks, after `start` in all and `slot` of this
        step."""


@dataclass(frozen=True, slots=True)
class Proportional:
    """In an epoch every task set provides as many tasks as it has, in an order redrawn each epoch."""

    sizes: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if not sum(self.sizes):
            raise DataError("there are no rows to put in order", key="rows")

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """Depends on `start` alone, so epochs run across steps."""
        if len(self.sizes) == 1:
            return [0] * count
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, offset = divmod(start + len(drawn), sum(self.sizes))
            drawn += _permuted(self, epoch)[offset : offset + count - len(drawn)].tolist()
        return drawn


@lru_cache(maxsize=4)
def _permuted(mixture: Proportional, epoch: int) -> np.ndarray:
    sizes = mixture.sizes
    return np.random.default_rng([mixture.seed, len(sizes), epoch]).permutation(np.repeat(np.arange(len(sizes)), sizes))


@dataclass(frozen=True, slots=True)
class Weighted:
    """Each step takes tasks from the task sets by weights that may change from step to step.

    Of n tasks a task set with share w provides n w, rounded up or down at random so that it provides n w in expectation
    (systematic sampling), in a random order.
    """

    weights: tuple[Mapping[int, float], ...]
    """Step -> weight for each task set; between two of these steps the weight changes linearly."""
    seed: int

    def shares(self, step: int) -> np.ndarray:
        """float64 [task sets]: shares of the tasks of a step. Raises DataError if all weights are 0."""
        weights = np.array([_at(points, step) for points in self.weights])
        if not weights.sum() > 0:
            raise DataError(f"at explore step {step} every task set has weight 0")
        return weights / weights.sum()

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """Depends on step and slot alone."""
        random = np.random.default_rng([self.seed, len(self.weights), step, slot])
        ticks = (np.arange(count) + random.random()) / count
        bounds = np.cumsum(self.shares(step))
        bounds[np.flatnonzero(self.shares(step))[-1] :] = 1.0  # rounding must not leave a gap at the end
        return random.permutation(np.searchsorted(bounds, ticks, side="right")).tolist()


def _at(points: Mapping[int, float], step: int) -> float:
    steps: Sequence[int] = sorted(points)
    return float(np.interp(step, steps, [points[step_number] for step_number in steps]))


@dataclass(slots=True)
class TaskSchedule:
    """Draws the tasks of explore steps. Steps count from 1 and run across epoch boundaries: no task is dropped.

    For each step: `begin`, any number of `draw` and `observe`, `finish_step`. `resume` restores any stored position.
    """

    tasksets: Sequence[Taskset]
    batch_size: int
    seed: int
    explorer: str = "explorer"
    """Name of the explorer, part of the groups' names."""
    sizes: tuple[int, ...] = field(init=False)
    mixture: Mixture = field(init=False)
    selectors: list[TaskSelector] = field(init=False, repr=False)
    step: int = field(init=False, default=0)
    """The step in progress, or the last one."""
    _selector_rows: list[SelectorRows] = field(init=False, repr=False)
    _drawn: list[int] = field(init=False)
    """Number of tasks drawn so far from each task set."""
    _slots: int = field(init=False)
    """Number of tasks requested in the step in progress."""
    _rows: list[list[int]] = field(init=False)
    """Rows of each task set drawn for the step in progress."""
    _rates: list[dict[int, list[float]]] = field(init=False)
    """Pass rates observed for these rows."""
    _learned: dict[str, Any] = field(init=False, default_factory=dict)
    """The last step's observations by the selectors, as JSON."""

    def __post_init__(self) -> None:
        if not self.tasksets:
            raise DataError(
                "there is no task set to explore; set buffer.explorer_input.taskset",
                key="buffer.explorer_input.taskset",
            )
        self.sizes = tuple(0 if isinstance(taskset, QueueTaskset) else len(taskset) for taskset in self.tasksets)
        self.mixture = self._mixture()
        self._selector_rows = [
            SelectorRows(len(taskset), taskset.features(), (self._seed(source), source))
            for source, taskset in enumerate(self.tasksets)
        ]
        self._start()

    def _mixture(self) -> Mixture:
        configs = [taskset.config for taskset in self.tasksets]
        unmixed = len(configs) == 1 or all(config.weight_points is None for config in configs)
        if unmixed and not self._queues:
            return Proportional(self.sizes, self._seed(0))
        return Weighted(tuple(config.weight_points or {1: 1.0} for config in configs), self._seed(0))

    @property
    def _queues(self) -> list[QueueTaskset]:
        return [taskset for taskset in self.tasksets if isinstance(taskset, QueueTaskset)]

    def _seed(self, source: int) -> int:
        seed = self.tasksets[source].config.task_selector.seed
        return self.seed if seed is None else seed

    def _start(self) -> None:
        self.selectors = [
            make_selector(selector.selector_type, rows, selector.kwargs)
            for selector, rows in zip(
                (taskset.config.task_selector for taskset in self.tasksets), self._selector_rows, strict=True
            )
        ]
        self._drawn = [0] * len(self.tasksets)
        self.begin(0)

    @property
    def epoch_length(self) -> int:
        """Number of tasks of an epoch: those of all task sets except queues."""
        return sum(self.sizes)

    def steps(self, epochs: int) -> int:
        """Return the whole steps in a number of epochs, at least one."""
        return max(1, epochs * self.epoch_length // self.batch_size)

    def rollouts(self, step: int) -> int:
        """Return the number of rollouts of the first tasks of a step."""
        sources = self.mixture.sources(step, 0, sum(self._drawn), self.batch_size)
        return sum(self.tasksets[source].config.repeat_times or 1 for source in sources)

    def begin(self, step: int) -> None:
        self.step, self._slots, self._learned = step, 0, {}
        self._rows = [[] for _ in self.tasksets]
        self._rates = [defaultdict(list) for _ in self.tasksets]

    def draw(self, count: int) -> list[Task]:
        """Return the next `count` tasks of the step in progress, each with its group; fewer if a queue has none."""
        slot, start = self._slots, sum(self._drawn)
        self._slots += count
        sources = self.mixture.sources(self.step, slot, start, count)
        rows = [iter(self._take(source, sources.count(source))) for source in range(len(self.tasksets))]
        drawn = [(slot_number, source, next(rows[source], None)) for slot_number, source in enumerate(sources, slot)]
        return [
            replace(self.tasksets[source][row], group=f"{self.explorer}/{self.step}/{slot_number}")
            for slot_number, source, row in drawn
            if row is not None
        ]

    def missing(self, step: int) -> dict[str, int]:
        """Read arrived tasks; return how many the queues still lack for a step, by task set. Empty if none is missing.

        Queues that have ended lack nothing.
        """
        sources = self.mixture.sources(step, 0, sum(self._drawn), self.batch_size) if self._queues else []
        lacking: dict[str, int] = {}
        for source, taskset in enumerate(self.tasksets):
            if isinstance(taskset, QueueTaskset):
                taskset.grow()
                lack = self._drawn[source] + sources.count(source) - len(taskset)
                if lack > 0 and not taskset.ended:
                    lacking[taskset.name] = lack
        return lacking

    @property
    def has_queues(self) -> bool:
        """True if there are queues, whose tasks may have to be waited for."""
        return bool(self._queues)

    @property
    def is_exhausted(self) -> bool:
        """True if a queue has ended and all its tasks have been drawn."""
        return any(
            isinstance(taskset, QueueTaskset) and taskset.ended and self._drawn[source] >= len(taskset)
            for source, taskset in enumerate(self.tasksets)
        )

    def _take(self, source: int, count: int) -> list[int]:
        if not count:
            return []
        taskset, start = self.tasksets[source], self._drawn[source]
        if isinstance(taskset, QueueTaskset):
            rows = list(range(start, min(start + count, len(taskset))))
        else:
            rows = self.selectors[source].draw(start, count, self._rows[source])
        self._drawn[source] += len(rows)
        self._rows[source] += rows
        return rows

    def observe(self, task: Task, scores: Sequence[float]) -> None:
        """Add the scores of a task's rollouts, each cut to 0 … 1; selectors see their mean at the end of the step."""
        source = [taskset.name for taskset in self.tasksets].index(task.taskset)
        if scores and self.selectors[source].learns:
            rate = math.fsum(min(max(score, 0.0), 1.0) for score in scores) / len(scores)
            self._rates[source][task.index].append(rate)

    def finish_step(self) -> dict[str, Any]:
        """Let the selectors learn from the step's scores; return the position after it, as JSON.

        The position includes the settings that it depends on.
        """
        for source, observed in enumerate(self._rates):
            if observed:
                rates = {row: math.fsum(scores) / len(scores) for row, scores in observed.items()}
                self.selectors[source].observe(rates)
                self._learned[self.tasksets[source].name] = {"rows": list(rates), "rates": list(rates.values())}
        self._rates = [defaultdict(list) for _ in self.tasksets]
        drawn = sum(self._drawn)
        epoch, offset = divmod(drawn, self.epoch_length or drawn + 1)
        counts = {"step": self.step, "epoch": epoch, "offset": offset, "drawn": drawn, "drawn_from": self._drawn.copy()}
        learned = {"observed": self._learned, "state": self._states()} if self._learns else {}
        last = {
            taskset.name: taskset.id_of(count)
            for taskset, count in zip(self.tasksets, self._drawn, strict=True)
            if isinstance(taskset, QueueTaskset)
        }
        return {**counts, "last_from_queues": last, **learned, **self._order_inputs()}

    @property
    def _learns(self) -> bool:
        return any(selector.learns for selector in self.selectors)

    def _states(self) -> list[int]:
        return [selector.state for selector in self.selectors]

    def resume(self, position: Mapping[str, Any] | None, positions: Positions = tuple) -> None:
        """Continue after a stored position; None: begin. `positions` are those of all steps up to it.

        Raises DataError if it belongs to another order of tasks (`check_order`).
        """
        stored = dict(position or {})
        check_order(stored, self._order_inputs())
        self._start()
        if stored:
            self._drawn = list(stored["drawn_from"])
        self.step = stored.get("step", 0)
        self._find_in_queues(stored.get("last_from_queues", {}))
        if not stored or not self._learns:
            return
        for past in positions():
            if past["step"] <= self.step:
                self._relearn(past.get("observed") or {})
        if self._states() != stored.get("state"):
            raise DataError(
                f"the run cannot continue after explore step {self.step}: what its task selector had learned cannot be "
                "rebuilt from the steps in its store. Give the run another `name`",
                key="task_selector",
            )

    def _find_in_queues(self, last: Mapping[str, int]) -> None:
        """Continue each queue after the last drawn task, by its id: settings that decide which tasks are usable may
        have changed. Raises DataError if a queue has lost tasks."""
        for source, (taskset, drawn) in enumerate(zip(self.tasksets, self._drawn, strict=True)):
            if isinstance(taskset, QueueTaskset):
                taskset.grow()
                if taskset.name in last:
                    self._drawn[source] = taskset.count_to(last[taskset.name])
                if taskset.last < last.get(taskset.name, 0) or len(taskset) < self._drawn[source]:
                    raise DataError(
                        f"the run cannot continue after explore step {self.step}: {drawn} tasks of '{taskset.name}' "
                        f"were drawn, but its queue has {len(taskset)}. Bring its file back, or start over",
                        key=taskset.name,
                    )

    def _relearn(self, observed: Mapping[str, Any]) -> None:
        for selector, taskset in zip(self.selectors, self.tasksets, strict=True):
            if seen := observed.get(taskset.name):
                selector.observe(dict(zip(seen["rows"], seen["rates"], strict=True)))

    def _order_inputs(self) -> dict[str, Any]:
        configs = {taskset.name: taskset.config for taskset in self.tasksets}
        settings: dict[str, Any] = {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "tasksets": {
                taskset.name: "queue" if isinstance(taskset, QueueTaskset) else size
                for taskset, size in zip(self.tasksets, self.sizes, strict=True)
            },
            "fingerprint of the usable rows": {
                taskset.name: taskset.fingerprint for taskset in self.tasksets if not isinstance(taskset, QueueTaskset)
            },
            "task_selector.selector_type": {
                name: config.task_selector.selector_type for name, config in configs.items()
            },
            "task_selector.seed": {name: self._seed(source) for source, name in enumerate(configs)},
            "task_selector.kwargs": {name: dict(config.task_selector.kwargs) for name, config in configs.items()},
            "values of task_selector.feature_keys": {
                name: selector.rows.fingerprint for name, selector in zip(configs, self.selectors, strict=True)
            },
        }
        if isinstance(self.mixture, Weighted):
            points = dict(zip(configs, self.mixture.weights, strict=True))
            settings["weight"] = {
                name: {str(step): w for step, w in by_step.items()} for name, by_step in points.items()
            }
        return settings


def _text(key: str, value: Any) -> str:
    return json.dumps(value, sort_keys=key != "tasksets")  # the order of task sets counts


def check_order(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise DataError if a setting that determines the order of rows differs from the recorded one.

    Settings that were not recorded are not compared.
    """
    changed = [
        f"{key} was {was[key]}, is {value}"
        for key, value in now.items()
        if key in was and _text(key, was[key]) != _text(key, value)
    ]
    if changed:
        raise DataError(
            f"the run cannot continue where it stopped, its rows would come in another order: {'; '.join(changed)}. "
            "Set it back, or give the run another `name`. (Rejected rows are named in the log; a newer version may "
            "reject rows that an older one took.)",
            key=changed[0].partition(" was ")[0],
        )


def open_tasksets(
    config: Config, encoder: ChatEncoder | None, rejected_rows: RejectedRows | None = None, is_eval: bool = False
) -> list[Taskset]:
    """Open the task sets of a run, for training or for evaluation. Without an encoder (an external model) prompts are
    not rendered. Raises DataError like `Taskset.open`."""
    inputs, model = config.buffer.explorer_input, config.model
    longest = None if model.enable_prompt_truncation else model.max_prompt_tokens
    prompts = PromptCheck(encoder, longest) if encoder else None
    configured = inputs.eval_tasksets if is_eval else inputs.tasksets
    return [
        QueueTaskset.of(config, taskset, prompts, rejected_rows)
        if taskset.storage_type == "queue"
        else Taskset.open(taskset, config.seed, is_eval, prompts, rejected_rows)
        for taskset in configured
    ]
