"""False promotions and tasks of the gate, in simulated comparisons of two models and real ones of a model with itself.

    python benchmarks/gate.py [--comparisons 1000] [--seed 0]
    python benchmarks/gate.py --real 50      # minutes

Each comparison draws 0/1 answers to common tasks: the models differ on a share of them. The gate looks after every task
and stops when it likes. The fixed test is a one-sided z-test at the same error whose size gives it the power that the
gate has in the same comparisons, with the variance known.

For the real ones the small model answers 1,000 tasks at temperature 1, twice as often as there are comparisons.
Each two answers to a task belong to one comparison, and every promotion is false.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np
from wrong_runs import config, run, warmed_up

from trinity_core.data.tiny import make_tiny
from trinity_core.exchange.tracking.answers import TaskAnswers, read_answers
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


def answered(folder: Path, times: int) -> list[TaskAnswers]:
    """Let the small model, warmed up, answer each held-out task so often."""
    made = warmed_up(folder / "warm_up", 0)
    held_out = make_tiny(folder / "held_out", 1, count_train=1000, count_test=16, count_sft=16)
    settings = config(made["model"], str(held_out.data), folder)
    inputs = settings["buffer"]["explorer_input"]
    taskset = inputs["taskset"] | {"name": "held-out", "repeat_times": times, "rollout_args": {"temperature": 1.0}}
    settings |= {"mode": "bench", "buffer": {"batch_size": 8, "explorer_input": {"eval_tasksets": [taskset]}}}
    done = run(folder, settings, {}, seconds=3600)
    answers = read_answers(folder / "checkpoints/wrong/run", "held-out", 0)
    if done.returncode or not answers:
        raise SystemExit(f"the evaluation failed:\n{done.stdout[-3000:]}")
    return answers


def compared(rng: np.random.Generator, answers: list[TaskAnswers], first: int, second: int) -> tuple[Finding, int, int]:
    """Compare two answers to each task in random order; return the finding, the tasks it took, and how many differ."""
    test, tasks, differing = GateTest(["test"], min_gain=MIN_GAIN, error=ERROR), 0, 0
    for chosen in rng.permutation(len(answers)):
        before, candidate = answers[chosen].scores[first], answers[chosen].scores[second]
        if before is not None and candidate is not None:
            test.add("test", before, candidate)
            tasks, differing = tasks + 1, differing + (before != candidate)
        if test.finding is not Finding.OPEN:
            break
    return test.finding, tasks, differing


def real(comparisons: int, rng: np.random.Generator) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = answered(Path(folder), 2 * comparisons)
    ended = [compared(rng, answers, number, number + 1) for number in range(0, 2 * comparisons, 2)]
    counts = ", ".join(f"{sum(found is kind for found, _, _ in ended)} {kind.name}" for kind in Finding)
    tasks, differing = fmean(count for _, count, _ in ended), fmean(differ / count for _, count, differ in ended)
    right = fmean(score for task in answers for score in task.scores if score is not None)
    print(f"{len(answers)} tasks, {right:.3f} right; {differing:.0%} differ; {tasks:.0f} tasks a comparison: {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, default=0, metavar="COMPARISONS", help="real comparisons instead")
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    if arguments.real:
        real(arguments.real, rng)
        return
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
