"""The order of rows and tasks: a pure function of (sizes, seed, step), so any step is computed on its own.

No iterator state is saved: a run that resumes at step e asks for step e and gets the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from trinity_core.data.task import Task
from trinity_core.data.taskset import Taskset
from trinity_core.errors import DataError

Selector = Callable[[int, np.random.Generator], np.ndarray]
"""`(count, random) -> order`: int64 [count], the row numbers of one epoch."""


def sequential(count: int, random: np.random.Generator) -> np.ndarray:
    """As stored."""
    return np.arange(count)


def shuffle(count: int, random: np.random.Generator) -> np.ndarray:
    """A new permutation each epoch."""
    return random.permutation(count)


def drawn(count: int, random: np.random.Generator) -> np.ndarray:
    """Drawn with replacement."""
    return random.integers(count, size=count)


SELECTORS: dict[str, Selector] = {"sequential": sequential, "shuffle": shuffle, "random": drawn}
"""Orders by name; a plugin adds its own as `SELECTORS[name] = function`."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """An endless order over one or several row sources, epoch after epoch.

    In an epoch every source gives as many rows as it has, in the order of its selector. Several sources are mixed by a
    permutation drawn anew each epoch, so that they appear in proportion to their sizes.
    """

    sizes: tuple[int, ...]
    selectors: tuple[str, ...]
    seeds: tuple[int, ...]
    """One per source. Mixing uses the first."""

    def __post_init__(self) -> None:
        for name in self.selectors:
            if name not in SELECTORS:
                raise DataError(f"there is no task selector '{name}'; there are {', '.join(sorted(SELECTORS))}")
        if not sum(self.sizes):
            raise DataError("there are no rows to put in order")

    @property
    def epoch_length(self) -> int:
        """Rows of an epoch."""
        return sum(self.sizes)

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """(source, row) for positions start … start + count - 1 of the endless order, which count from 0."""
        taken: list[tuple[int, int]] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), self.epoch_length)
            sources, rows = _epoch(self, epoch)
            stretch = slice(offset, offset + count - len(taken))
            taken += zip(sources[stretch].tolist(), rows[stretch].tolist(), strict=True)
        return taken


@lru_cache(maxsize=8)
def _epoch(order: RowOrder, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources [N], rows [N]) of one epoch."""
    per_source = [
        SELECTORS[name](size, np.random.default_rng([seed, source, epoch]))
        for source, (size, name, seed) in enumerate(zip(order.sizes, order.selectors, order.seeds, strict=True))
    ]
    sources = np.repeat(np.arange(len(order.sizes)), order.sizes)
    if len(order.sizes) > 1:
        sources = np.random.default_rng([order.seeds[0], len(order.sizes), epoch]).permutation(sources)
    rows = np.empty(order.epoch_length, dtype=np.int64)
    for source, own in enumerate(per_source):
        rows[sources == source] = own
    return sources, rows


@dataclass(frozen=True, slots=True)
class TaskSchedule:
    """Which tasks an explore step takes. Steps count from 1 and run across epoch boundaries: no task is dropped."""

    tasksets: Sequence[Taskset]
    batch_size: int
    seed: int
    explorer: str = "explorer"
    """Name of the explorer; a part of the groups' names."""
    order: RowOrder = field(init=False)

    def __post_init__(self) -> None:
        if not self.tasksets:
            raise DataError("there is no task set to explore; set buffer.explorer_input.taskset")
        selectors = [taskset.config.task_selector for taskset in self.tasksets]
        order = RowOrder(
            tuple(len(taskset) for taskset in self.tasksets),
            tuple(selector.selector_type for selector in selectors),
            tuple(self.seed if selector.seed is None else selector.seed for selector in selectors),
        )
        object.__setattr__(self, "order", order)

    def tasks(self, step: int) -> list[Task]:
        """The tasks of explore step `step` if each step before it drew `batch_size`, each with its group."""
        return self.draw(step, (step - 1) * self.batch_size, self.batch_size)

    def draw(self, step: int, start: int, count: int, slot: int = 0) -> list[Task]:
        """The next `count` tasks for explore step `step` after `start` tasks were drawn, `slot` of them for it."""
        return [
            replace(self.tasksets[source][row], group=f"{self.explorer}/{step}/{place}")
            for place, (source, row) in enumerate(self.order.take(start, count), slot)
        ]

    def steps(self, epochs: int) -> int:
        """Whole steps in a number of epochs, at least one."""
        return max(1, epochs * self.order.epoch_length // self.batch_size)

    def position(self, step: int, drawn: int | None = None) -> dict[str, Any]:
        """The schedule's position after `step` steps, as JSON, with the settings that it depends on.

        `drawn`: the tasks of these steps; None: `batch_size` each.
        """
        drawn = step * self.batch_size if drawn is None else drawn
        epoch, offset = divmod(drawn, self.order.epoch_length)
        return {"step": step, "epoch": epoch, "offset": offset, "drawn": drawn, **self._order_inputs()}

    def check(self, position: dict[str, Any]) -> None:
        """Raise DataError if a recorded position belongs to another order of tasks: see `check_order`."""
        check_order(position, self._order_inputs())

    def _order_inputs(self) -> dict[str, Any]:
        """The settings that determine the order of tasks."""
        names = [taskset.name for taskset in self.tasksets]
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "tasksets": dict(zip(names, self.order.sizes, strict=True)),
            "task_selector.selector_type": dict(zip(names, self.order.selectors, strict=True)),
            "task_selector.seed": dict(zip(names, self.order.seeds, strict=True)),
        }


def check_order(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise DataError if a setting that determines the order of rows differs from the recorded one.

    Settings that were not recorded are not compared.
    """
    changed = [
        f"{key} was {was[key]}, is {value}"
        for key, value in now.items()
        if key in was and json.dumps(was[key]) != json.dumps(value)  # as text: the order of task sets counts
    ]
    if changed:
        raise DataError(
            f"the run cannot go on where it stopped, its rows would come in another order: {'; '.join(changed)}. Set "
            "it back, or start anew: with another name, or with continue_from_checkpoint: false. (Rejected rows are "
            "named in the log; a newer version may reject rows that an older one took.)"
        )
