"""The gate's statistics: one-sided tests by betting, whose evidence may be looked at after any number of tasks. Pure.

A test starts with a capital of 1 and bets a share of it, before each task, that the task's value lies above the null.
If the mean is at most the null, the capital is a supermartingale: with probability 1 - error it never reaches 1 / error
(Ville's inequality), however often one looks and whenever one stops (Waudby-Smith and Ramdas 2024, JRSS B 86, arXiv
2010.09686). A second capital bets against the alternative, so that a hopeless candidate ends early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import exp, log
from typing import Any

PRIOR_TASKS, PRIOR_VARIANCE = 30.0, 0.15
"""Weight and value of the variance assumed before the first task. It affects the number of tasks, not the validity."""
LARGEST_BET = 0.9
"""Share of the largest bet that cannot lose the whole capital."""


class Finding(Enum):
    """What a test has found so far. It never changes again once it is not `OPEN`."""

    OPEN = "open"
    SHOWN = "shown"
    """The mean lies above the null."""
    RULED_OUT = "ruled out"
    """The mean lies below the alternative."""


@dataclass
class BettingTest:
    """Tests that the mean of values in [low, high] lies above `null`, with bets that suit a mean of `alternative`.

    `error` bounds the probability of SHOWN if the mean is at most the null, and that of RULED_OUT if it is at least the
    alternative. Tasks must come in random order.
    """

    null: float
    alternative: float
    error: float = 0.05
    low: float = -1.0
    high: float = 1.0
    tasks: int = 0
    finding: Finding = Finding.OPEN
    _total: float = 0.0
    _squares: float = 0.0
    _for: float = 0.0
    """Logarithm of the capital that bets on a mean above the null."""
    _against: float = 0.0
    _highest: float = 0.0

    def add(self, value: float) -> Finding:
        """Take the value of one more task. Raises ValueError if it lies outside [low, high]."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{value} lies outside {self.low} and {self.high}")
        gap = self.alternative - self.null
        bet = gap / (self._variance() + gap**2)
        up = min(bet, LARGEST_BET / (self.null - self.low)) if self.null > self.low else bet
        down = min(bet, LARGEST_BET / (self.high - self.alternative)) if self.high > self.alternative else bet
        self._for += log(1 + up * (value - self.null))
        self._against += log(1 - down * (value - self.alternative))
        self._highest = max(self._highest, self._for)
        self.tasks += 1
        self._total += value
        self._squares += value**2
        if self.finding is Finding.OPEN and self._for >= -log(self.error):
            self.finding = Finding.SHOWN
        elif self.finding is Finding.OPEN and self._against >= -log(self.error):
            self.finding = Finding.RULED_OUT
        return self.finding

    @property
    def mean(self) -> float:
        return self._total / self.tasks if self.tasks else 0.0

    @property
    def capital(self) -> float:
        return exp(min(self._for, 700.0))

    @property
    def evidence(self) -> float:
        """The largest capital so far. If the mean is at most the null, it reaches e with probability at most 1 / e."""
        return exp(min(self._highest, 700.0))

    def _variance(self) -> float:
        """Return the variance expected of the next value, from the earlier ones."""
        spread = self._squares - (self._total**2 / self.tasks if self.tasks else 0.0)
        return max((PRIOR_TASKS * PRIOR_VARIANCE + spread) / (PRIOR_TASKS + self.tasks), 1e-3)


@dataclass
class Requirement:
    """One thing that a candidate must show on some eval sets: a `gain`, `no loss`, or a `floor`."""

    kind: str
    tasksets: Sequence[str]
    test: BettingTest

    def told(self) -> dict[str, Any]:
        return {
            "requirement": self.kind, "tasksets": list(self.tasksets), "finding": self.test.finding.value,
            "tasks": self.test.tasks, "mean": round(self.test.mean, 4), "needed": self.test.null,
            "evidence": float(f"{self.test.evidence:.4g}"),
        }  # fmt: skip


class GateTest:
    """All requirements of a gate: the candidate is promoted when every one is shown.

    It is promoted wrongly with at most the error of one test, because a candidate that fails a requirement has to pass
    that requirement's own test (intersection-union).
    """

    def __init__(
        self, gains: Sequence[str], no_loss: Sequence[str] = (), floors: Mapping[str, float] | None = None,
        min_gain: float = 0.05, max_loss: float = 0.05, error: float = 0.05,
    ) -> None:  # fmt: skip
        """`gains`: eval sets over which a gain is tested together; `min_gain`: the gain that is found with probability
        1 - `error`, given enough tasks. On each set of `no_loss` the difference must lie above -`max_loss`."""
        floors = floors or {}
        self.requirements = [Requirement("gain", gains, BettingTest(0.0, min_gain, error))]
        self.requirements += [Requirement("no loss", [name], BettingTest(-max_loss, 0.0, error)) for name in no_loss]
        for name, floor in floors.items():
            above = min(floor + min_gain, (1 + floor) / 2)
            self.requirements.append(Requirement("floor", [name], BettingTest(floor, above, error, low=0.0)))
        self.tasks: dict[str, int] = {}
        """Eval set → tasks that both have answered."""

    def add(self, taskset: str, before: float, after: float) -> None:
        """Take a task's mean score of the champion and of the candidate, each in [0, 1]."""
        self.tasks[taskset] = self.tasks.get(taskset, 0) + 1
        for requirement in self.requirements:
            if taskset in requirement.tasksets:
                requirement.test.add(after if requirement.kind == "floor" else after - before)

    def needs(self, taskset: str) -> bool:
        """True if a requirement on this eval set is still open."""
        mine = (requirement for requirement in self.requirements if taskset in requirement.tasksets)
        return any(requirement.test.finding is Finding.OPEN for requirement in mine)

    @property
    def finding(self) -> Finding:
        findings = {requirement.test.finding for requirement in self.requirements}
        return next(found for found in (Finding.RULED_OUT, Finding.OPEN, Finding.SHOWN) if found in findings)
