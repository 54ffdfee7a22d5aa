"""Which rows of a task set are drawn next.

A selector is a state machine without a clock: what it draws follows from the rows, the seed, the number of tasks drawn
so far and what it has observed. A selector that learns nothing has no state at all. One that learns is rebuilt on
resume from what was observed in each explore step, which is stored with the step (`schedule.py`).
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from trinity_core.data.values import number_of
from trinity_core.errors import DataError, InputError
from trinity_core.registry import Registry


@dataclass(frozen=True, slots=True)
class SelectorRows:
    """The rows that a selector chooses from."""

    count: int
    features: np.ndarray = field(repr=False)
    """float64 [count, K]: the columns named by `task_selector.feature_keys`."""
    seed: tuple[int, int] = (0, 0)
    """The selector's seed, and the number of the task set among the run's."""

    def random(self, key: int) -> np.random.Generator:
        """The random numbers of one epoch or one draw."""
        return np.random.default_rng([*self.seed, key])

    @property
    def fingerprint(self) -> int:
        """Checksum of the features."""
        return zlib.crc32(np.ascontiguousarray(self.features).tobytes())


class TaskSelector:
    """Draws the rows of one task set. Arguments after `source` are those of `task_selector.kwargs`."""

    columns: ClassVar[Sequence[int]] = (0,)
    """The numbers of `feature_keys` that it takes."""
    learns: ClassVar[bool] = False
    """True if `observe` changes what is drawn."""

    def __init__(self, source: SelectorRows) -> None:
        self.rows = source

    def draw(self, start: int, count: int, barred: Collection[int]) -> list[int]:
        """`count` row numbers after `start` rows were drawn, `barred` of them for the explore step in progress."""
        raise NotImplementedError

    def observe(self, rates: Mapping[int, float]) -> None:
        """Take in an explore step: row -> mean reward of its rollouts, within 0 and 1. Called once a step."""

    @property
    def state(self) -> int:
        """Checksum of what was learned; 0 if nothing is."""
        return 0


SELECTORS: Registry[type[TaskSelector]] = Registry("task selector", leading=1)
"""Selectors by name; a plugin adds its own with `@SELECTORS.register("name")`."""


def make_selector(name: str, rows: SelectorRows, kwargs: Mapping[str, Any]) -> TaskSelector:
    """The selector of that name. Raises InputError for an unknown name or arguments that it does not take."""
    selector = SELECTORS.resolve(name)
    check_columns(name, rows.features.shape[1])
    return selector(rows, **kwargs)


def check_columns(name: str, given: int) -> None:
    """Raise InputError unless the selector takes so many `feature_keys`."""
    takes = SELECTORS.resolve(name).columns
    if given not in takes:
        expected = " or ".join(map(str, takes)) if len(takes) < 5 else f"at least {min(takes)}"
        raise InputError(f"task selector '{name}' takes {expected} feature_keys, not {given}")


def feature_values(row: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
    """The features of a row. Raises DataError where one is missing or no number."""
    return [_number(row, key) for key in keys]


def _number(row: Mapping[str, Any], key: str) -> float:
    if key not in row:
        raise DataError(f"column '{key}' (task_selector.feature_keys) is missing")
    number = number_of(row[key])
    if number is None:
        raise DataError(f"column '{key}' (task_selector.feature_keys) is no number: {row[key]!r}")
    return number
