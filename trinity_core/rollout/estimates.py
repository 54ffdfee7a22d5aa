"""Estimates from the answers of an evaluation: pass@k, and the interval in which its accuracy lies. Pure.

Questions count as drawn at random: an interval covers what other questions of the same kind would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb, sqrt

import numpy as np

Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution: two-sided intervals of 95 %."""


def expected_best(scores: Sequence[float], k: int) -> float:
    """The best of k answers drawn without replacement from these n >= k, in expectation: unbiased for k new answers.

    With scores of 0 and 1 it is pass@k of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n-c, k) / C(n, k)
    for c right answers. With other scores, the i-th lowest is the best of C(i-1, k-1) of the C(n, k) draws.
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"the best of {k} answers needs at least {k}, not {len(scores)}")
    ordered, draws = sorted(scores), comb(len(scores), k)
    return math.fsum(score * (comb(rank, k - 1) / draws) for rank, score in enumerate(ordered))


def sizes(n: int) -> list[int]:
    """The k for which pass@k is reported, given n answers to a question: powers of two below n, and n."""
    return [k for k in (1 << power for power in range(n.bit_length())) if k < n] + [n]


def standard_error(questions: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all answers, clustered by question; None with fewer than two questions.

    Answers to one question are not independent: many answers to few questions say less than as many to different ones.
    The residuals of a question are added up before they are squared (clustered standard errors, Miller 2024, arXiv
    2411.00640), with the factor Q / (Q - 1) for Q questions. With one answer a question it is the usual standard error.
    """
    count = len(questions)
    if count < 2:
        return None
    mean = float(np.mean([score for question in questions for score in question]))
    answers = sum(map(len, questions))
    sums = [math.fsum(score - mean for score in question) for question in questions]
    return sqrt(math.fsum(each**2 for each in sums) * count / (count - 1)) / answers


def interval(questions: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The interval of 95 % of the mean over all answers, None with fewer than two questions.

    Scores from 0 to 1: Wilson's interval (1927) at the effective number of answers, p (1 - p) / SE² with the clustered
    standard error, as Franco et al. 2019 (PMC6690503) recommend for clustered samples; where all answers are equal, at
    the number of questions. It stays within 0 and 1, and does not shrink to nothing at either. Other scores: mean ±
    1.96 SE.
    """
    error = standard_error(questions)
    if error is None:
        return None
    scores = [score for question in questions for score in question]
    mean = float(np.mean(scores))
    if min(scores) < 0 or max(scores) > 1:
        return mean - Z95 * error, mean + Z95 * error
    effective = mean * (1 - mean) / error**2 if error > 0 else float(len(questions))
    return wilson(mean, min(effective, float(len(scores))))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share that was seen in n trials."""
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def deviation(repeats: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the mean score between repeats (n - 1 in the denominator); None with fewer than two.

    A repeat is one answer to every question: how much a score of one answer each moves when it is measured again.
    """
    means = [float(np.mean(scores)) for scores in repeats if scores]
    return float(np.std(means, ddof=1)) if len(means) > 1 else None
