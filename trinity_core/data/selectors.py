"""Decides which rows of a task set are drawn next.

A selector is a state machine without a clock: what it draws follows from the rows, the seed, the number of tasks drawn
so far and its observations. A selector that learns nothing has no state at all. One that learns is rebuilt on resume
from the observations of each explore step, which are stored with the step (`schedule.py`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.registry import Registry
from trinity_core.data.values import number_of

SLOW = 0.9
"""Weight of the old c in the new one (`DifficultyBased`)."""


@dataclass(frozen=True, slots=True)
class SelectorRows:
    count: int
    features: np.ndarray = field(repr=False)
    """float64 [count, K]: the columns named by `task_selector.feature_keys`."""
    seed: tuple[int, int] = (0, 0)
    """The selector's seed, and the index of the task set in the run."""

    def random(self, key: int) -> np.random.Generator:
        return np.random.default_rng([*self.seed, key])

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.features).tobytes())


class TaskSelector:
    """Draws the rows of one task set. Arguments after `source` are those of `task_selector.kwargs`."""

    columns: ClassVar[Sequence[int]] = (0,)
    """Allowed numbers of `feature_keys`."""
    learns: ClassVar[bool] = False
    """True if `observe` changes what is drawn."""

    def __init__(self, source: SelectorRows) -> None:
        self.rows = source

    def draw(self, start: int, count: int, barred: Collection[int]) -> list[int]:
        """Return `count` row numbers after `start` rows were drawn, `barred` of them for the explore step in
        progress."""
        raise NotImplementedError

    def observe(self, rates: Mapping[int, float]) -> None:
        """Observe an explore step: row -> mean reward of its rollouts, within 0 and 1. Called once a step."""

    @property
    def state(self) -> int:
        """Checksum of the learned state; 0 without any."""
        return 0


SELECTORS: Registry[type[TaskSelector]] = Registry("task selector", leading=1)
"""Selectors by name; a plugin adds its own with `@SELECTORS.register("name")`."""


def make_selector(name: str, rows: SelectorRows, kwargs: Mapping[str, Any]) -> TaskSelector:
    """Return the selector of that name. Raises InputError for an unknown name or unknown arguments."""
    selector = SELECTORS.resolve(name)
    check_columns(name, rows.features.shape[1])
    return selector(rows, **kwargs)


def check_columns(name: str, count: int) -> None:
    """Raise InputError unless the selector takes `count` `feature_keys`."""
    takes = SELECTORS.resolve(name).columns
    if count not in takes:
        expected = " or ".join(map(str, takes)) if len(takes) < 5 else f"at least {min(takes)}"
        raise InputError(f"task selector '{name}' takes {expected} feature_keys, not {count}", key="feature_keys")


def feature_values(row: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
    """Return the features of a row. Raises DataError if one is missing or not a number."""
    return [_number(row, key) for key in keys]


def _number(row: Mapping[str, Any], key: str) -> float:
    if key not in row:
        raise DataError(f"column '{key}' (task_selector.feature_keys) is missing", key=key)
    number = number_of(row[key])
    if number is None:
        raise DataError(f"column '{key}' (task_selector.feature_keys) is not a number: {row[key]!r}", key=key)
    return number


class EpochSelector(TaskSelector):
    """Goes through all rows, epoch after epoch, in an order that depends only on the epoch."""

    _cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def order(self, epoch: int) -> np.ndarray:
        """int64 [count]: the row numbers of one epoch."""
        raise NotImplementedError

    def draw(self, start: int, count: int, barred: Collection[int]) -> list[int]:
        """Draws do not depend on where one step ends and the next begins."""
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, offset = divmod(start + len(drawn), self.rows.count)
            drawn += self._order(epoch)[offset : offset + count - len(drawn)].tolist()
        return drawn

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached[0] != epoch:
            self._cached = epoch, self.order(epoch)
        return self._cached[1]


@SELECTORS.register("sequential")
class Sequential(EpochSelector):
    def order(self, epoch: int) -> np.ndarray:
        return np.arange(self.rows.count)


@SELECTORS.register("shuffle")
class Shuffle(EpochSelector):
    def order(self, epoch: int) -> np.ndarray:
        return self.rows.random(epoch).permutation(self.rows.count)


@SELECTORS.register("random")
class DrawnWithReplacement(EpochSelector):
    def order(self, epoch: int) -> np.ndarray:
        return self.rows.random(epoch).integers(self.rows.count, size=self.rows.count)


@SELECTORS.register("offline_easy2hard")
class EasyToHard(EpochSelector):
    """From the highest feature values to the lowest, the first column before the second; equal rows as stored.

    As in Trinity-RFT a high value means an easy task, such as the pass rate of a reference model.
    """

    columns = range(1, 100)

    def order(self, epoch: int) -> np.ndarray:
        """The same order each epoch."""
        return np.lexsort(tuple(-self.rows.features.T[::-1]))


@SELECTORS.register("priority")
class ByPriority(EpochSelector):
    """Rows of the highest priority first, those of equal priority in an order redrawn each epoch."""

    columns = (1,)

    def order(self, epoch: int) -> np.ndarray:
        shuffled = self.rows.random(epoch).permutation(self.rows.count)
        return shuffled[np.argsort(-self.rows.features[shuffled, 0], kind="stable")]


@SELECTORS.register("difficulty_based")
class DifficultyBased(TaskSelector):
    """Tasks whose estimated pass rate is nearest to a target, by Bayesian online task selection.

    With `target_reward` 0.5 groups differ most in their rewards, so that GRPO learns most.

    BOTS: Shen et al. 2025, arXiv 2510.26374, sections 3 and 4; the arguments are spelt as in Trinity-RFT. The pass rate
    of task i is Beta(a_i, b_i), at first Beta(1, 1). After each explore step, in which the rollouts of the tasks O were
    scored

        a_i <- (1 - lamb) a_i + lamb + (1 - rho) m p_i [i in O] + rho m q_i
        b_i <- (1 - lamb) b_i + lamb + (1 - rho) m (1 - p_i) [i in O] + rho m (1 - q_i)

    with p_i the mean reward of its rollouts (explicit evidence) and q_i what is implied for it (implicit evidence): p_i
    for tasks in O; for others the pass rates w_i and s_i of a weak and of a strong reference model, interpolated:

        q_i = clip(w_i + c (s_i - w_i), 0, 1),    c <- 0.9 c + 0.1 (p - w) / (s - w + 1e-6)

    where p, w and s are means over O; the first step sets c. Without such models (no `feature_keys`) only tasks in O
    get evidence, m p_i and m (1 - p_i), and all others forget.

    The next tasks are drawn without replacement within a step, with probabilities proportional to exp(-|target_reward -
    e_i| / tau), by adding Gumbel noise and taking the largest (Kool et al. 2019, arXiv 1903.06059); with tau = 0 the
    nearest, at random among equally near ones. e_i is the mean a_i / (a_i + b_i), or with `do_sample` a draw from the
    Beta distribution (Thompson sampling).
    """

    columns = (0, 2)
    learns = True

    def __init__(
        self,
        source: SelectorRows,
        m: Annotated[float, Ge(0)] = 16,
        lamb: Annotated[float, Ge(0), Le(1)] = 0.2,
        rho: Annotated[float, Ge(0), Le(1)] = 0.2,
        target_reward: Annotated[float, Ge(0), Le(1)] = 0.5,
        tau: Annotated[float, Ge(0)] = 0.1,
        do_sample: bool = False,
    ) -> None:
        super().__init__(source)
        self.m, self.lamb, self.rho = m, lamb, rho
        self.target_reward, self.tau, self.do_sample = target_reward, tau, do_sample
        self.passes = np.ones(source.count)
        """float64 [count]: a."""
        self.failures = np.ones(source.count)
        """float64 [count]: b."""
        self.interpolation: float | None = None
        """c; None before the first observation, and without features."""

    @property
    def pass_rates(self) -> np.ndarray:
        """float64 [count]: the expected pass rate of each row."""
        return self.passes / (self.passes + self.failures)

    def draw(self, start: int, count: int, barred: Collection[int]) -> list[int]:
        """Rows repeat within a step only if it takes more than there are."""
        random = self.rows.random(start)
        rates = random.beta(self.passes, self.failures) if self.do_sample else self.pass_rates
        scores = -np.abs(self.target_reward - rates)
        noise = random.gumbel(size=self.rows.count)
        free = np.ones(self.rows.count, dtype=bool)
        free[list(barred)] = len(barred) >= self.rows.count
        drawn: list[int] = []
        while len(drawn) < count:
            largest = _largest(scores, noise, self.tau, free, count - len(drawn))
            drawn += largest.tolist()
            free[:] = True
        return drawn

    def observe(self, rates: Mapping[int, float]) -> None:
        """A step without any verdict changes nothing."""
        if not rates:
            return
        rows = np.array(list(rates))
        seen = np.array(list(rates.values()))
        implied = self._implied(rows, seen)
        for evidence, share in ((self.passes, lambda rate: rate), (self.failures, lambda rate: 1 - rate)):
            evidence *= 1 - self.lamb
            evidence += self.lamb
            if implied is None:
                evidence[rows] += self.m * share(seen)
            else:
                evidence += self.rho * self.m * share(implied)
                evidence[rows] += (1 - self.rho) * self.m * share(seen)

    def _implied(self, rows: np.ndarray, seen: np.ndarray) -> np.ndarray | None:
        """float64 [count]: q; None without features."""
        if not self.rows.features.shape[1]:
            return None
        weak, strong = self.rows.features.T
        mean, low, high = (math.fsum(values) / len(rows) for values in (seen, weak[rows], strong[rows]))
        newest = (mean - low) / (high - low + 1e-6)
        average = self.interpolation
        self.interpolation = newest if average is None else SLOW * average + (1 - SLOW) * newest
        implied = np.clip(weak + self.interpolation * (strong - weak), 0, 1)
        implied[rows] = seen
        return implied

    @property
    def state(self) -> int:
        """Checksum of the estimates."""
        return zlib.crc32(self.failures.tobytes(), zlib.crc32(self.passes.tobytes()))


def _largest(scores: np.ndarray, noise: np.ndarray, tau: float, free: np.ndarray, count: int) -> np.ndarray:
    """Return the free rows with the largest scores, perturbed by `noise` at temperature `tau`, largest first; ties by
    noise."""
    rows = np.flatnonzero(free)
    count = min(count, len(rows))
    keys = scores[rows] if tau == 0 else scores[rows] / tau + noise[rows]
    near = rows[keys >= np.partition(keys, len(rows) - count)[len(rows) - count]]  # with all that tie with the last
    keys = scores[near] if tau == 0 else scores[near] / tau + noise[near]
    return near[np.lexsort((-noise[near], -keys))][:count]
