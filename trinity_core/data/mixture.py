"""From which task set each task of an explore step comes. Pure functions of seed, step and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from trinity_core.errors import DataError


class Mixture(Protocol):
    """Says which task set gives each task."""

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """Numbers of the task sets of the next `count` tasks, after `start` in all and `slot` of this step."""


@dataclass(frozen=True, slots=True)
class Proportional:
    """In an epoch every task set gives as many tasks as it has, in an order drawn anew each epoch."""

    sizes: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if not sum(self.sizes):
            raise DataError("there are no rows to put in order")

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """See `Mixture`. Depends on `start` alone, so epochs run across steps."""
        if len(self.sizes) == 1:
            return [0] * count
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), sum(self.sizes))
            taken += _permuted(self, epoch)[offset : offset + count - len(taken)].tolist()
        return taken

    def counts(self, drawn: int) -> list[int]:
        """How many of the first `drawn` tasks each task set gave."""
        epoch, offset = divmod(drawn, sum(self.sizes))
        begun = np.bincount(self.sources(0, 0, drawn - offset, offset), minlength=len(self.sizes))
        return [epoch * size + int(given) for size, given in zip(self.sizes, begun, strict=True)]


@lru_cache(maxsize=4)
def _permuted(mixture: Proportional, epoch: int) -> np.ndarray:
    sizes = mixture.sizes
    return np.random.default_rng([mixture.seed, len(sizes), epoch]).permutation(np.repeat(np.arange(len(sizes)), sizes))


@dataclass(frozen=True, slots=True)
class Weighted:
    """Each step takes from the task sets by weights that may change from step to step.

    Of n tasks a task set with share w gives n w, rounded up or down at random so that it gives n w in expectation
    (systematic sampling), in a random order.
    """

    weights: tuple[Mapping[int, float], ...]
    """For each task set step -> weight; between two of these steps the weight changes linearly."""
    seed: int

    def shares(self, step: int) -> np.ndarray:
        """float64 [task sets]: shares of the tasks of a step. Raises DataError where all weights are 0."""
        weights = np.array([_at(points, step) for points in self.weights])
        if not weights.sum() > 0:
            raise DataError(f"at explore step {step} every task set has weight 0")
        return weights / weights.sum()

    def sources(self, step: int, slot: int, start: int, count: int) -> list[int]:
        """See `Mixture`. Depends on step and slot alone."""
        random = np.random.default_rng([self.seed, len(self.weights), step, slot])
        ticks = (np.arange(count) + random.random()) / count
        bounds = np.cumsum(self.shares(step))
        bounds[np.flatnonzero(self.shares(step))[-1] :] = 1.0  # rounding must not leave a gap at the end
        return random.permutation(np.searchsorted(bounds, ticks, side="right")).tolist()


def _at(points: Mapping[int, float], step: int) -> float:
    steps: Sequence[int] = sorted(points)
    return float(np.interp(step, steps, [points[each] for each in steps]))
