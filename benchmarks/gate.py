"""False promotions and tasks of the gate, in simulated comparisons of two models.

    python benchmarks/gate.py [--comparisons 1000] [--seed 0]

Each comparison draws 0/1 answers to common tasks: the models differ on a share of them. The gate looks after every task
and stops when it likes. The fixed test is a one-sided z-test at the same error whose size gives it the power that the
gate has in the same comparisons, with the variance known.
"""

from __future__ import annotations

import argparse
from statistics import NormalDist, fmean

import numpy as np

from trinity_core.run.sequential import Finding, GateTest

ERROR, MIN_GAIN, LARGEST = 0.05, 0.05, 8000


def promoted(rng: np.random.Generator, differing: float, gain: float, largest: int = LARGEST) -> tuple[bool, int]:
    """Return whether the gate promotes, and after how many tasks it ends."""
    test = GateTest(["test"], min_gain=MIN_GAIN, error=ERROR)
    draws = rng.random(largest)
    for task, draw in enumerate(draws, 1):
        won, lost = draw < (differing + gain) / 2, draw > 1 - (differing - gain) / 2
        test.add("test", float(lost), float(won))
        if test.finding is not Finding.OPEN:
            return test.finding is Finding.SHOWN, task
    return False, largest


def fixed_size(power: float, differing: float, gain: float) -> float:
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - ERROR) + normal.inv_cdf(min(power, 0.9995))
    return float(quantiles**2 * (differing - gain**2) / gain**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    print("| tasks that differ | gain | promoted | tasks, mean | fixed test of equal power | fewer |")
    print("| --- | --- | --- | --- | --- | --- |")
    for differing in (0.1, 0.2, 0.4):
        sizes = {}
        for gain in (MIN_GAIN, 2 * MIN_GAIN if differing > 0.1 else 0.09, 0.0, -MIN_GAIN):
            ended = [promoted(rng, differing, gain) for _ in range(arguments.comparisons)]
            share, tasks = fmean(was for was, _ in ended), fmean(count for _, count in ended)
            if gain > 0:
                sizes[gain] = fixed_size(share, differing, gain)
            fixed = sizes.get(gain, sizes[MIN_GAIN])  # without a gain: the test that finds `MIN_GAIN` as surely
            print(
                f"| {differing:.0%} | {gain:+.2f} | {share:.1%} | {tasks:.0f} | {fixed:.0f} | {1 - tasks / fixed:.0%} |"
            )


if __name__ == "__main__":
    main()
