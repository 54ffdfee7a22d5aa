"""`difficulty_based`: tasks whose estimated pass rate is nearest to a target, by Bayesian online task selection.

BOTS: Shen et al. 2025, arXiv 2510.26374, sections 3 and 4; the arguments are spelt as in Trinity-RFT. The pass rate of
task i is Beta(a_i, b_i), at first Beta(1, 1). After each explore step, in which the rollouts of the tasks O were scored

    a_i <- (1 - lamb) a_i + lamb + (1 - rho) m p_i [i in O] + rho m q_i
    b_i <- (1 - lamb) b_i + lamb + (1 - rho) m (1 - p_i) [i in O] + rho m (1 - q_i)

with p_i the mean reward of its rollouts (explicit evidence) and q_i what is implied for it (implicit evidence): p_i for
tasks in O; for others the pass rates w_i and s_i of a weak and of a strong reference model, interpolated:

    q_i = clip(w_i + c (s_i - w_i), 0, 1),    c <- 0.9 c + 0.1 (p - w) / (s - w + 1e-6)

where p, w and s are means over O; the first step sets c. Without such models (no `feature_keys`) only tasks in O get
evidence, m p_i and m (1 - p_i), and all others forget.

The next tasks are drawn without replacement within a step, with probabilities proportional to
exp(-|target_reward - e_i| / tau), by adding Gumbel noise and taking the largest (Kool et al. 2019, arXiv 1903.06059);
with tau = 0 the nearest, at random among equally near ones. e_i is the mean a_i / (a_i + b_i), or with `do_sample` a
draw from the Beta distribution (Thompson sampling).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from trinity_core.data.selectors.selector import SELECTORS, SelectorRows, TaskSelector

SLOW = 0.9
"""The share of the old c in the new one."""


@SELECTORS.register("difficulty_based")
class DifficultyBased(TaskSelector):
    """See the module. With `target_reward` 0.5 groups differ most in their rewards, so that GRPO learns most."""

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
        """See `TaskSelector`. Rows are repeated within a step only where it takes more than there are."""
        random = self.rows.random(start)
        rates = random.beta(self.passes, self.failures) if self.do_sample else self.pass_rates
        scores = -np.abs(self.target_reward - rates)
        noise = random.gumbel(size=self.rows.count)
        free = np.ones(self.rows.count, dtype=bool)
        free[list(barred)] = len(barred) >= self.rows.count
        drawn: list[int] = []
        while len(drawn) < count:
            chosen = _largest(scores, noise, self.tau, free, count - len(drawn))
            drawn += chosen.tolist()
            free[:] = True
        return drawn

    def observe(self, rates: Mapping[int, float]) -> None:
        """See `TaskSelector`. A step without any verdict changes nothing."""
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
        found = (mean - low) / (high - low + 1e-6)
        before = self.interpolation
        self.interpolation = found if before is None else SLOW * before + (1 - SLOW) * found
        implied = np.clip(weak + self.interpolation * (strong - weak), 0, 1)
        implied[rows] = seen
        return implied

    @property
    def state(self) -> int:
        """Checksum of the estimates."""
        return zlib.crc32(self.failures.tobytes(), zlib.crc32(self.passes.tobytes()))


def _largest(scores: np.ndarray, noise: np.ndarray, tau: float, free: np.ndarray, count: int) -> np.ndarray:
    """The free rows of the largest scores, perturbed by `noise` at temperature `tau`, largest first; ties by noise."""
    rows = np.flatnonzero(free)
    count = min(count, len(rows))
    keys = scores[rows] if tau == 0 else scores[rows] / tau + noise[rows]
    near = rows[keys >= np.partition(keys, len(rows) - count)[len(rows) - count]]  # with all that tie with the last
    keys = scores[near] if tau == 0 else scores[near] / tau + noise[near]
    return near[np.lexsort((-noise[near], -keys))][:count]
