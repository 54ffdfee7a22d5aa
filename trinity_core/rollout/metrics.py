"""The metrics of an explore step or an evaluation, computed from the outcomes of its tasks. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.errors import Unanswered
from trinity_core.rollout.estimates import deviation, expected_best, interval, sizes
from trinity_core.rollout.runner import Outcome
from trinity_core.workflows.rewards.base import VERIFIER_ERRORS
from trinity_core.workflows.unscored import runs_of

COUNTED = frozenset({VERIFIER_ERRORS})
"""Metrics of experiences that are added up; all others are averaged over the rollouts that have them."""


def experiences_of(outcomes: Iterable[Outcome]) -> list[Experience]:
    """All experiences but those that were dropped with their task, in the order of their tasks."""
    return [experience for outcome in outcomes if not outcome.dropped for experience in outcome.experiences]


def step_numbers(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rewards, lengths, reward parts, failures, sessions of the OpenAI API.

    A rollout counts once in the mean of its reward and its metrics, however many experiences it became.
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
    runs = rollouts_of(outcomes)
    rewards = _rewards(runs)
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
    if sessions := [outcome.sessions for outcome in outcomes if outcome.sessions is not None]:
        numbers |= {
            "sessions": float(sum(one.sessions for one in sessions)),
            "sessions/tokens": float(sum(one.sampled for one in sessions)),
            "sessions/discarded_tokens": float(sum(one.discarded for one in sessions)),
        }
    return numbers | {
        name if name in COUNTED else f"{name}/mean": value
        for name, value in combined(runs).items()
        if name != "response_length"
    }


def dropped_whole(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """What was dropped with its whole task: group -> reason -> experiences."""
    return {each.task.group: {each.dropped: len(each.experiences)} for each in outcomes if each.dropped}


def dropped_numbers(dropped: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """`experiences/dropped/<operator>`: the experiences that each operator dropped (group -> operator -> number)."""
    totals: Counter[str] = Counter()
    for by_operator in dropped.values():
        totals.update(by_operator)
    return {f"experiences/dropped/{name}": float(number) for name, number in sorted(totals.items())}


def eval_numbers(taskset: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The score of one task set, as `eval/<taskset>/<name>`.

    `accuracy` is the reward's part of that name, else the reward, averaged over the answers that have a verdict
    (`judged` of `answers`), with its interval of 95 % from `accuracy_low` to `accuracy_high`. All answers of a task
    that failed count as wrong, and the task in `failed_tasks`; an answer that an endpoint did not give has no verdict,
    and counts in `failed_requests`. Without any verdict there is no accuracy.

    With several answers a task also `accuracy_std` between repeats, `best`, the mean over tasks of the best answer, and
    `pass@<k>` (`best@<k>` where scores are not just 0 and 1) over the tasks with at least k verdicts.
    """
    runs = rollouts_of(outcomes)
    rewards = _rewards(runs)
    answers = answers_by_task(outcomes)
    judged = [scores for each in answers if (scores := [score for score in each if score is not None])]
    numbers = {
        "answers": float(sum(map(len, answers))),
        "judged": float(sum(map(len, judged))),
        "tasks": float(len(answers)),
        "failed_tasks": float(sum(outcome.failed and not _is_unanswered(outcome) for outcome in outcomes)),
    }
    if unanswered := sum(_is_unanswered(outcome) for outcome in outcomes):
        numbers["failed_requests"] = float(unanswered)
    if rewards:
        numbers["reward"] = float(np.mean(rewards))
    if judged:
        numbers |= _accuracy_numbers(judged) | _repeat_numbers(answers, judged)
    for name, value in combined(runs).items():
        numbers.setdefault(name, value)
    return {f"eval/{taskset}/{name}": value for name, value in numbers.items()}


def answers_by_task(outcomes: Sequence[Outcome]) -> list[list[float | None]]:
    """The score of each answer to each task, in the order of the repeats; None for an answer without a verdict.

    The last turn of a run is its answer. A task may have several outcomes, one for each repeat.
    """
    tasks: dict[int, list[float | None]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.failed:
            given = None if _is_unanswered(outcome) else 0.0
            tasks[outcome.task.index] += [given] * outcome.task.repeat_times
        else:
            tasks[outcome.task.index] += [_score(turns[-1]) for turns in runs_of(outcome.experiences)]
    return list(tasks.values())


def _accuracy_numbers(judged: Sequence[Sequence[float]]) -> dict[str, float]:
    numbers = {"accuracy": float(np.mean([score for scores in judged for score in scores]))}
    if within := interval(judged):
        numbers |= {"accuracy_low": within[0], "accuracy_high": within[1]}
    return numbers


def _repeat_numbers(answers: Sequence[Sequence[float | None]], judged: Sequence[Sequence[float]]) -> dict[str, float]:
    repeats = max(map(len, answers))
    if repeats < 2:
        return {}
    numbers = {"best": float(np.mean([max(scores) for scores in judged]))}
    by_repeat = [[score for score in each if score is not None] for each in zip_longest(*answers)]
    if (spread := deviation(by_repeat)) is not None:
        numbers["accuracy_std"] = spread
    name = "pass" if {score for scores in judged for score in scores} <= {0.0, 1.0} else "best"
    for k in sizes(repeats):
        if enough := [scores for scores in judged if len(scores) >= k]:
            numbers[f"{name}@{k}"] = float(np.mean([expected_best(scores, k) for scores in enough]))
    return numbers


def rollouts_of(outcomes: Iterable[Outcome]) -> list[list[Experience]]:
    """The experiences of each rollout."""
    return [run for outcome in outcomes for run in runs_of(outcome.experiences)]


def combined(runs: Iterable[Sequence[Experience]]) -> dict[str, float]:
    """The experiences' own metrics: sums of those in `COUNTED`; of the others the mean over rollouts of their means."""
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        of_run: dict[str, list[float]] = defaultdict(list)
        for experience in run:
            for name, value in experience.metrics.items():
                of_run[name].append(value)
        for name, found in of_run.items():
            values[name].append(sum(found) if name in COUNTED else float(np.mean(found)))
    return {name: float(sum(v) if name in COUNTED else np.mean(v)) for name, v in sorted(values.items())}


def scores_of(experiences: Sequence[Experience]) -> list[float]:
    """The score of each rollout of a task, as in an evaluation (`eval_numbers`), but for those without a verdict."""
    scores = [_score(turns[-1]) for turns in runs_of(experiences)]
    return [score for score in scores if score is not None]


def _rewards(runs: Iterable[Sequence[Experience]]) -> list[float]:
    given = [[one.reward for one in run if one.reward is not None] for run in runs]
    return [float(np.mean(rewards)) for rewards in given if rewards]


def _zero_variance_groups(outcomes: Sequence[Outcome]) -> float:
    runs = [runs_of(outcome.experiences) for outcome in outcomes]
    groups = [{one.reward for run in group for one in run} for group in runs if len(group) > 1]
    return sum(len(rewards - {None}) < 2 for rewards in groups) / len(groups) if groups else 0.0


def _is_unanswered(outcome: Outcome) -> bool:
    return isinstance(outcome.error, Unanswered)


def _score(experience: Experience) -> float | None:
    """The score of an answer, None if its verifier failed; of a turn of a rollout with a `return`, that."""
    if experience.metrics.get(VERIFIER_ERRORS):
        return None
    return experience.metrics.get("accuracy", experience.metrics.get("return", experience.reward or 0.0))
