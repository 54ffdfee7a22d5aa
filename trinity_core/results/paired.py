"""Differences between two sets of answers to the same tasks, with their 95 % intervals. Pure.

The tasks that two models share make their difference more certain than either score: what counts is the tasks on which
they differ. Answers to one task are dependent: standard errors are clustered by task (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, sqrt
from statistics import fmean, variance
from typing import Any

from trinity_core.rollout.metrics import Z95, standard_error

Scores = Mapping[str, Sequence[float | None]]
"""Task → scores of its answers, in the order of repeats; None: no verdict."""
STUDENT = (inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 0, 1, … 10 degrees of freedom."""
BLOCKS = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """What `after` has more than `before`, over the answers (or steps) that both have."""

    before: float
    after: float
    low: float
    high: float
    pairs: int
    """Tasks that both have answered."""
    won: int = 0
    """Tasks whose mean score is higher in `after`."""
    lost: int = 0

    @property
    def verdict(self) -> str:
        if self.low <= 0 <= self.high:
            return "not distinguishable"
        return "better" if self.low > 0 else "worse"

    def within(self, half: float) -> Difference:
        """Return the difference with another half-width of its interval."""
        centre = (self.low + self.high) / 2
        return replace(self, low=centre - half, high=centre + half)

    def json(self) -> dict[str, Any]:
        difference = {"difference": self.after - self.before, "tied": self.pairs - self.won - self.lost}
        return asdict(self) | difference | {"verdict": self.verdict}


def paired(before: Scores, after: Scores) -> Difference | None:
    """Return the difference of two models' mean scores, paired by task and repeat; None with fewer than two tasks.

    For scores within 0 and 1 the interval counts one more task won and one more lost, as Bonett and Price 2012 (J.
    Educ. Behav. Stat. 37, 479) recommend for paired proportions: it does not collapse where few tasks differ.
    """
    pairs = {task: pairs for task in before if (pairs := _pairs(before[task], after.get(task, ())))}
    if len(pairs) < 2:
        return None
    deltas = [[second - first for first, second in of_task] for of_task in pairs.values()]
    firsts, seconds = ([pair[i] for of_task in pairs.values() for pair in of_task] for i in (0, 1))
    within_one = min(*firsts, *seconds) >= 0 and max(*firsts, *seconds) <= 1
    widest = max(map(len, deltas))
    adjusted = [*deltas, [1.0] * widest, [-1.0] * widest] if within_one else deltas
    centre = fmean([delta for of_task in adjusted for delta in of_task])
    half = Z95 * (standard_error(adjusted) or 0.0)
    sums = [sum(of_task) for of_task in deltas]
    won, lost = sum(total > 0 for total in sums), sum(total < 0 for total in sums)
    return Difference(fmean(firsts), fmean(seconds), centre - half, centre + half, len(pairs), won, lost)


def paired_over_seeds(before: Sequence[Scores], after: Sequence[Scores]) -> Difference | None:
    """Like `paired`, for several runs of each of two configurations, which differ in their seeds.

    If one of them has several runs, the answers to a task are averaged over the runs of a configuration. If both have,
    the pooled variance between runs is added to that of the tasks: the difference then holds for further seeds too.
    """
    if len(before) == len(after) == 1:
        return paired(before[0], after[0])
    difference = paired(_averaged(before), _averaged(after))
    if difference is None or min(len(before), len(after)) < 2:
        return difference
    freedom = len(before) + len(after) - 2
    pooled = sum(variance(means(runs)) * (len(runs) - 1) for runs in (before, after)) / freedom
    of_runs = pooled * (1 / len(before) + 1 / len(after))
    quantile = STUDENT[freedom] if freedom < len(STUDENT) else Z95 * (1 + 1.2 / freedom)
    return difference.within(sqrt(((difference.high - difference.low) / 2) ** 2 + quantile**2 * of_runs))


def paired_by_blocks(before: Mapping[int, float], after: Mapping[int, float]) -> Difference | None:
    """The mean difference of two curves over the steps at which both are finite; None with fewer than two blocks.

    Neighbouring steps are dependent: they form up to `BLOCKS` clusters.
    """
    steps = sorted(step for step in before.keys() & after.keys() if isfinite(before[step]) and isfinite(after[step]))
    size = max(1, -(-len(steps) // BLOCKS))
    clusters = [[after[step] - before[step] for step in steps[i : i + size]] for i in range(0, len(steps), size)]
    if len(clusters) < 2:
        return None
    first, second = (fmean([curve[step] for step in steps]) for curve in (before, after))
    half = STUDENT[min(len(clusters) - 1, 10)] * (standard_error(clusters) or 0.0)
    return Difference(first, second, second - first, second - first, len(steps)).within(half)


def means(runs: Sequence[Scores]) -> list[float]:
    """Return the mean score of each run over the tasks that all of them have answered."""
    averages = [{task: fmean(judged) for task in run if (judged := _judged(run[task]))} for run in runs]
    common = set.intersection(*(set(run) for run in averages)) if averages else set()
    return [fmean([run[task] for task in common]) for run in averages] if common else []


def _pairs(before: Sequence[float | None], after: Sequence[float | None]) -> list[tuple[float, float]]:
    # Differing numbers of repeats: the surplus has no partner.
    return [(first, second) for first, second in zip(before, after, strict=False) if None not in (first, second)]  # type: ignore[misc]


def _judged(scores: Sequence[float | None]) -> list[float]:
    return [score for score in scores if score is not None]


def _averaged(runs: Sequence[Scores]) -> Scores:
    common = set.intersection(*(set(run) for run in runs))
    return {
        task: [fmean([fmean(judged) for judged in of_runs])]
        for task in runs[0]
        if task in common and all(of_runs := [_judged(run[task]) for run in runs])
    }
