"""The numbers of a step, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trinity_core.data.experience import Experience
from trinity_core.data.task import Task
from trinity_core.rollout.metrics import eval_numbers, step_numbers
from trinity_core.rollout.runner import Outcome


def experience(reward, length=2, prompt=3, **metrics) -> Experience:
    tokens = np.arange(prompt + length)
    return Experience(tokens, prompt, np.ones(length, bool), reward=reward, metrics=metrics)


def outcome(*experiences, error=None, retries=0, repeat_times=1) -> Outcome:
    return Outcome(Task(0, {}, "set", "w", repeat_times), list(experiences), retries, error)


def test_rewards_lengths_parts_and_failures():
    numbers = step_numbers([
        outcome(experience(1.0, 2, accuracy=1.0), experience(0.0, 4, accuracy=0.0), retries=1),
        outcome(experience(1.0, 6), experience(None, 8, verifier_errors=1.0)),
        outcome(error=ValueError("no"), retries=2),
    ])  # fmt: skip
    assert (numbers["tasks"], numbers["failed_tasks"]) == (3, 1)
    assert numbers["retries"] == 3
    assert numbers["experiences"] == 4
    assert numbers["reward/mean"] == pytest.approx(2 / 3)
    assert (numbers["reward/min"], numbers["reward/max"]) == (0, 1)
    assert numbers["reward/zero_variance_groups"] == pytest.approx(0.5)
    assert numbers["response_length/mean"] == pytest.approx(5.0)
    assert numbers["response_length/max"] == 8
    assert numbers["accuracy/mean"] == pytest.approx(0.5)
    assert numbers["verifier_errors"] == 1


def test_a_step_without_any_experience_has_no_rewards():
    numbers = step_numbers([outcome(error=ValueError("no"))])
    assert numbers["experiences"] == 0
    assert "reward/mean" not in numbers


def test_failed_tasks_count_as_wrong_in_the_accuracy():
    numbers = eval_numbers("easy", [
        outcome(experience(1.1, accuracy=1.0)),
        outcome(experience(0.1, accuracy=0.0)),
        outcome(experience(None, verifier_errors=1.0)),
        outcome(error=ValueError("no")),
    ])  # fmt: skip
    assert numbers["eval/easy/accuracy"] == pytest.approx(1 / 3)
    assert numbers["eval/easy/reward"] == pytest.approx(0.6)
    assert numbers["eval/easy/failed_tasks"] == 1
    assert numbers["eval/easy/verifier_errors"] == 1
    assert "eval/easy/best" not in numbers


def test_all_answers_of_a_failed_task_are_missing():
    right = [experience(1.0)] * 4
    numbers = eval_numbers("set", [outcome(*right), outcome(error=ValueError("no"), repeat_times=4)])
    assert numbers["eval/set/accuracy"] == numbers["eval/set/best"] == pytest.approx(0.5)


def test_the_best_of_several_answers():
    numbers = eval_numbers(
        "set", [outcome(experience(0.0), experience(1.0)), outcome(experience(0.0), experience(0.0))]
    )
    assert numbers["eval/set/best"] == pytest.approx(0.5)
    assert numbers["eval/set/accuracy"] == pytest.approx(0.25)
