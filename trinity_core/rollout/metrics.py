"""The metrics of an explore step or an evaluation, computed from the outcomes of its tasks. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.rollout.runner import Outcome

COUNTED = frozenset({"verifier_errors"})
"""Metrics of experiences that are added up; all others are averaged over the experiences that have them."""


def experiences_of(outcomes: Iterable[Outcome]) -> list[Experience]:
    """All experiences, in the order of their tasks."""
    return [experience for outcome in outcomes for experience in outcome.experiences]


def step_numbers(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rewards, lengths, reward parts, failures.

    `reward/zero_variance_groups` is the share of groups whose rewards are all equal: a group-relative algorithm learns
    nothing from them.
    """
    experiences = experiences_of(outcomes)
    numbers = {
        "tasks": float(len(outcomes)),
        "failed_tasks": float(sum(outcome.failed for outcome in outcomes)),
        "retries": float(sum(outcome.retries for outcome in outcomes)),
        "experiences": float(len(experiences)),
    }
    rewards = [experience.reward for experience in experiences if experience.reward is not None]
    if rewards:
        numbers |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/max": float(np.max(rewards)),
            "reward/min": float(np.min(rewards)),
            "reward/zero_variance_groups": _zero_variance_groups(outcomes),
        }
    if experiences:
        lengths = [experience.response_length for experience in experiences]
        numbers |= {
            "response_length/mean": float(np.mean(lengths)),
            "response_length/max": float(np.max(lengths)),
            "prompt_length/mean": float(np.mean([experience.prompt_length for experience in experiences])),
        }
    return numbers | {
        name if name in COUNTED else f"{name}/mean": value
        for name, value in combined(experiences).items()
        if name != "response_length"
    }


def dropped_numbers(dropped: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """`experiences/dropped/<operator>`: the experiences that each operator dropped (group -> operator -> number)."""
    totals: Counter[str] = Counter()
    for by_operator in dropped.values():
        totals.update(by_operator)
    return {f"experiences/dropped/{name}": float(number) for name, number in sorted(totals.items())}


def eval_numbers(taskset: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The score of one task set, as `eval/<taskset>/<name>`.

    `accuracy` is the reward's part of that name, else the reward, averaged over the answers that have a verdict. All
    answers of a task that failed count as wrong, and the task in `failed_tasks`. With several answers a task, `best` is
    the mean over tasks of the best one.
    """
    experiences = experiences_of(outcomes)
    rewards = [e.reward for e in experiences if e.reward is not None]
    scores = [[_score(e) for e in outcome.experiences if _has_verdict(e)] for outcome in outcomes]
    missing = [0.0] * sum(outcome.task.repeat_times for outcome in outcomes if outcome.failed)
    flat = [score for task in scores for score in task] + missing
    numbers = {
        "accuracy": float(np.mean(flat)) if flat else 0.0,
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "tasks": float(len(outcomes)),
        "failed_tasks": float(sum(outcome.failed for outcome in outcomes)),
    }
    if any(len(task) > 1 for task in scores):
        numbers["best"] = float(np.mean([max(task, default=0.0) for task in scores]))
    for name, value in combined(experiences).items():
        numbers.setdefault(name, value)
    return {f"eval/{taskset}/{name}": value for name, value in numbers.items()}


def combined(experiences: Iterable[Experience]) -> dict[str, float]:
    """The experiences' own metrics: sums of those in `COUNTED`, means of the others."""
    values: dict[str, list[float]] = defaultdict(list)
    for experience in experiences:
        for name, value in experience.metrics.items():
            values[name].append(value)
    return {name: float(sum(v) if name in COUNTED else np.mean(v)) for name, v in sorted(values.items())}


def _zero_variance_groups(outcomes: Sequence[Outcome]) -> float:
    groups = [{e.reward for e in outcome.experiences} for outcome in outcomes if len(outcome.experiences) > 1]
    return sum(len(rewards - {None}) < 2 for rewards in groups) / len(groups) if groups else 0.0


def _has_verdict(experience: Experience) -> bool:
    return not experience.metrics.get("verifier_errors")


def _score(experience: Experience) -> float:
    return experience.metrics.get("accuracy", experience.reward or 0.0)
