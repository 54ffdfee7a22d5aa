"""The metrics of an explore step or an evaluation, computed from its outcomes, with pass@k and intervals. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from math import comb, sqrt

import numpy as np

from trinity_core.base.errors import Unanswered
from trinity_core.data.experience import Experience, mean_reward
from trinity_core.exchange.tracking.answers import SHOWN, TaskAnswers, row_digest
from trinity_core.rollout.runner import Outcome
from trinity_core.workflows.base import runs_of
from trinity_core.workflows.rewards.base import JUDGE_CALLS, VERIFIER_ERRORS

COUNTED = frozenset({VERIFIER_ERRORS, JUDGE_CALLS})
"""Metrics of experiences that are summed; all others are averaged over the rollouts that have them."""
Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution, for two-sided 95 % intervals."""


def experiences_of(outcomes: Iterable[Outcome]) -> list[Experience]:
    """Return all experiences, in task order, except those dropped with their whole task."""
    return [experience for outcome in outcomes if not outcome.dropped for experience in outcome.experiences]


def step_numbers(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Rewards, lengths, reward parts, failures, sequences per rollout, sessions of the OpenAI API.

    A rollout counts once in the means of its reward and metrics, however many experiences it has. Rewards of tasks with
    a truncated prompt are excluded. `reward/zero_variance_groups` is the fraction of groups whose rollouts' rewards are
    all equal: a group-relative algorithm learns nothing from them.
    """
    experiences = experiences_of(outcomes)
    numbers = {
        "tasks": float(len(outcomes)),
        "failed_tasks": float(sum(outcome.failed for outcome in outcomes)),
        "failed_rollouts": float(sum(len(outcome.failed_runs) for outcome in outcomes if not outcome.failed)),
        "retries": float(sum(outcome.retries for outcome in outcomes)),
        "experiences": float(len(experiences)),
    }
    runs = runs_of_all(outcomes)
    if runs:
        sequences = [len(run) for run in runs]
        numbers["sequences_per_rollout/mean"] = float(np.mean(sequences))
        numbers["sequences_per_rollout/max"] = float(np.max(sequences))
    asked = [outcome for outcome in outcomes if not outcome.is_cut]
    rewards = _rewards(runs_of_all(asked))
    if rewards:
        numbers |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/max": float(np.max(rewards)),
            "reward/min": float(np.min(rewards)),
            "reward/zero_variance_groups": _zero_variance_groups(asked),
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
            "sessions": float(sum(session.sessions for session in sessions)),
            "sessions/tokens": float(sum(session.sampled for session in sessions)),
            "sessions/discarded_tokens": float(sum(session.discarded for session in sessions)),
            "sessions/guided_answers": float(sum(session.guided for session in sessions)),
            "sessions/guided_tokens": float(sum(session.guided_tokens for session in sessions)),
        }
    parts = {name if name in COUNTED else f"{name}/mean": value for name, value in combined(runs).items()}
    return parts | numbers  # a part of the reward may be called `reward`


def dropped_whole(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Experiences dropped with their whole task, also those not sampled to the end: group -> reason -> number."""
    return {
        outcome.task.group: {outcome.dropped: len(outcome.experiences) or outcome.task.repeat_times}
        for outcome in outcomes
        if outcome.dropped
    }


def dropped_numbers(dropped: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """`experiences/dropped/<operator>`: the number of experiences that each operator dropped (group -> operator ->
    number)."""
    totals: Counter[str] = Counter()
    for by_operator in dropped.values():
        totals.update(by_operator)
    return {f"experiences/dropped/{name}": float(number) for name, number in sorted(totals.items())}


def eval_numbers(taskset: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The score of one task set, as `eval/<taskset>/<name>`.

    `accuracy` is the reward's part of that name, else the reward, averaged over the answers with a verdict (`judged` of
    `answers`), with a 95 % interval from `accuracy_low` to `accuracy_high`. Rollouts that failed or that the
    workflow did not return count as wrong, and a task whose rollouts all failed in `failed_tasks`. An answer that an
    endpoint did not return has no verdict and counts in `failed_requests`; one of which nothing was sampled, as its
    prompt is too long, has none and counts in `unsampled`. Without any verdict there is no accuracy.

    With several answers a task, adds `accuracy_std` between repeats, `best`, the mean over tasks of the best answer,
    and `pass@<k>` (`best@<k>` if scores are not just 0 and 1) over the tasks with at least k verdicts.
    """
    runs = runs_of_all(outcome for outcome in outcomes if not outcome.is_cut)
    rewards = _rewards(runs)
    answers = answers_by_task(outcomes)
    judged = [scores for answer in answers if (scores := [score for score in answer if score is not None])]
    numbers = {
        "answers": float(sum(map(len, answers))),
        "judged": float(sum(map(len, judged))),
        "tasks": float(len(answers)),
        "failed_tasks": float(sum(outcome.failed and not _is_unanswered(outcome) for outcome in outcomes)),
    }
    if unanswered := sum(_is_unanswered(outcome) for outcome in outcomes):
        numbers["failed_requests"] = float(unanswered)
    if unsampled := sum(len(_answers(outcome)) for outcome in outcomes if outcome.is_cut):
        numbers["unsampled"] = float(unsampled)
    if rewards:
        numbers["reward"] = float(np.mean(rewards))
    if judged:
        numbers |= _accuracy_numbers(judged) | _repeat_numbers(answers, judged)
    for name, value in combined(runs).items():
        numbers.setdefault(name, value)
    return {f"eval/{taskset}/{name}": value for name, value in numbers.items()}


def answers_by_task(outcomes: Sequence[Outcome]) -> list[list[float | None]]:
    """Return the score of each answer to each task, in the order of repeats; None for an answer without a verdict.

    The last turn of a run is its answer. A task may have several outcomes, one for each repeat.
    """
    return [[score for outcome in task for score in _scores(outcome)] for task in _by_task(outcomes)]


def task_answers(outcomes: Sequence[Outcome]) -> list[TaskAnswers]:
    """Return what is stored of each task's answers; `answers_by_task` scores them."""
    stored = []
    for of_task in _by_task(outcomes):
        task, runs = of_task[0].task, [turns for outcome in of_task for turns in runs_of(outcome.of_task)]
        prompts = [str(turns[0].info.get("prompt", "")) for turns in runs]
        stored.append(
            TaskAnswers(
                task=task.index,
                digest=row_digest(task.raw),
                location=task.location,
                scores=[score for outcome in of_task for score in _scores(outcome)],
                prompt=prompts[0][:SHOWN] if prompts else "",
                answers=[
                    "" if answer is None else str(answer.info.get("response", ""))[-SHOWN:]
                    for outcome in of_task
                    for answer in _answers(outcome)
                ],
            )
        )
    return stored


def _by_task(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    tasks: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        tasks[outcome.task.index].append(outcome)
    return list(tasks.values())


def _answers(outcome: Outcome) -> list[Experience | None]:
    """Return the last turn of each rollout of the task, by number; None for one that failed or was not returned.

    Rollouts whose numbers are equal or out of range stand in the order in which they were returned. If some have groups
    of their own, none counts as missing.
    """
    returned = [turns[-1] for turns in runs_of(outcome.of_task)]
    by_run = {answer.run: answer for answer in returned}
    repeats = range(0 if outcome.further_groups else outcome.task.repeat_times)
    if len(by_run) == len(returned) and by_run.keys() <= set(repeats):
        return [by_run.get(run) for run in repeats]
    answers: list[Experience | None] = [*returned]
    for run in outcome.failed_runs:
        answers.insert(run, None)
    return answers + [None] * (len(repeats) - len(answers))


def _scores(outcome: Outcome) -> list[float | None]:
    answers = _answers(outcome)
    if outcome.is_cut:
        return [None] * len(answers)
    missing = None if _is_unanswered(outcome) else 0.0
    return [missing if answer is None else _score(answer) for answer in answers]


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
    by_repeat = [[score for score in scores if score is not None] for scores in zip_longest(*answers)]
    if (spread := deviation(by_repeat)) is not None:
        numbers["accuracy_std"] = spread
    name = "pass" if {score for scores in judged for score in scores} <= {0.0, 1.0} else "best"
    for k in sizes(repeats):
        if enough := [scores for scores in judged if len(scores) >= k]:
            numbers[f"{name}@{k}"] = float(np.mean([expected_best(scores, k) for scores in enough]))
    return numbers


def runs_of_all(outcomes: Iterable[Outcome]) -> list[list[Experience]]:
    return [run for outcome in outcomes for run in runs_of(outcome.experiences)]


def combined(runs: Iterable[Sequence[Experience]]) -> dict[str, float]:
    """Combine the experiences' own metrics: sums of those in `COUNTED`; else means over rollouts of the means of their
    rows."""
    values: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        of_run: dict[str, list[float]] = defaultdict(list)
        for experience in run:
            for name, value in experience.metrics.items():
                of_run[name].append(value)
        for name, numbers in of_run.items():
            values[name].append(sum(numbers) if name in COUNTED else float(np.mean(numbers)))
    return {name: float(sum(v) if name in COUNTED else np.mean(v)) for name, v in sorted(values.items())}


def scores_of(outcome: Outcome) -> list[float]:
    """Return the score of each rollout of a task, as in an evaluation (`eval_numbers`), without those that have no
    verdict; none for a task that its step did not wait for."""
    return [] if outcome.dropped else [score for score in _scores(outcome) if score is not None]


def _rewards(runs: Iterable[Sequence[Experience]]) -> list[float]:
    totals = [[total for experience in run if (total := experience.total_reward) is not None] for run in runs]
    return [mean_reward(rewards) for rewards in totals if rewards]


def _zero_variance_groups(outcomes: Sequence[Outcome]) -> float:
    """Fraction of zero-variance groups among the groups with at least two judged rollouts."""
    groups = [rewards for outcome in outcomes if len(rewards := _rewards(runs_of(outcome.of_task))) > 1]
    return sum(len(set(rewards)) == 1 for rewards in groups) / len(groups) if groups else 0.0


def _is_unanswered(outcome: Outcome) -> bool:
    return isinstance(outcome.error, Unanswered)


def _score(experience: Experience) -> float | None:
    """Return the score of an answer, or the `return` of the rollout if its turn has one; None without a verdict."""
    if experience.metrics.get(VERIFIER_ERRORS):
        return None
    return experience.metrics.get("accuracy", experience.metrics.get("return", experience.total_reward))


def expected_best(scores: Sequence[float], k: int) -> float:
    """Return the expected best of k answers drawn without replacement from these n >= k: unbiased for k new answers.

    With scores of 0 and 1 it is pass@k of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n-c, k) / C(n, k) for
    c right answers. With other scores, the i-th lowest is the best of C(i-1, k-1) of the C(n, k) draws.
    """
    if not 1 <= k <= len(scores):
        raise ValueError(f"the best of {k} answers needs at least {k}, not {len(scores)}")
    ordered, draws = sorted(scores), comb(len(scores), k)
    return math.fsum(score * (comb(rank, k - 1) / draws) for rank, score in enumerate(ordered))


def sizes(n: int) -> list[int]:
    """Return the k for which pass@k is reported for n answers a question: powers of two below n, and n."""
    return [k for k in (1 << power for power in range(n.bit_length())) if k < n] + [n]


def standard_error(questions: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all answers, clustered by question; None with fewer than two questions.

    Answers to one question are not independent: many answers to few questions are less informative than as many to
    different ones. The residuals of a question are summed before they are squared (clustered standard errors, Miller
    2024, arXiv 2411.00640), with the factor Q / (Q - 1) for Q questions. With one answer a question it is the usual
    standard error.
    """
    count = len(questions)
    if count < 2:
        return None
    mean = float(np.mean([score for question in questions for score in question]))
    answers = sum(map(len, questions))
    sums = [math.fsum(score - mean for score in question) for question in questions]
    return sqrt(math.fsum(total**2 for total in sums) * count / (count - 1)) / answers


def interval(questions: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The 95 % interval of the mean over all answers; None with fewer than two questions.

    For scores within 0 and 1: Wilson's interval (1927) at the effective number of answers, p (1 - p) / SE² with the
    clustered standard error, as Franco et al. 2019 (PMC6690503) recommend for clustered samples; at the number of
    questions if their means are all equal, up to rounding. It stays within 0 and 1 and does not collapse at either. For
    other scores: mean ± 1.96 SE.
    """
    error = standard_error(questions)
    if error is None:
        return None
    scores = [score for question in questions for score in question]
    mean = float(np.mean(scores))
    if min(scores) < 0 or max(scores) > 1:
        return mean - Z95 * error, mean + Z95 * error
    effective = mean * (1 - mean) / error**2 if error > 1e-9 else float(len(questions))
    return wilson(mean, min(effective, float(len(scores))))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a share observed in n trials."""
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    # The ends 0 and 1, of a share of 0 and 1, are exact; rounding would put the sum beside them.
    return (max(0.0, centre - half) if share > 0 else 0.0), (min(1.0, centre + half) if share < 1 else 1.0)


def deviation(repeats: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of the mean score between repeats (n - 1 in the denominator); None with fewer than two.

    A repeat is one answer to every question: the deviation is how much a single-answer score varies between
    evaluations.
    """
    means = [float(np.mean(scores)) for scores in repeats if scores]
    return float(np.std(means, ddof=1)) if len(means) > 1 else None
