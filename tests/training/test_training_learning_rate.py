"""Learning rates computed by hand."""

import math

import pytest

from trinity_core.training.learner import LearningRateSchedule, warmup_steps


def test_warm_up_is_linear_to_the_peak():
    schedule = LearningRateSchedule(lr=8.0, total_steps=10, warmup_steps=4)
    assert [schedule.at(step) for step in range(1, 7)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_cosine_reaches_its_minimum_after_the_last_step():
    schedule = LearningRateSchedule(lr=1.0, total_steps=12, warmup_steps=2, style="cosine", min_lr_ratio=0.1)
    # 0.1 + 0.9 * (1 + cos(pi * (step - 3) / 10)) / 2
    assert schedule.at(2) == schedule.at(3) == 1.0
    assert schedule.at(8) == pytest.approx(0.55)
    assert schedule.at(5) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 5)))
    assert schedule.at(13) == pytest.approx(0.1)
    assert schedule.at(20) == pytest.approx(0.1)


def test_linear_falls_by_equal_parts():
    schedule = LearningRateSchedule(lr=4.0, total_steps=5, warmup_steps=1, style="linear")
    assert [schedule.at(step) for step in range(1, 7)] == pytest.approx([4.0, 4.0, 3.0, 2.0, 1.0, 0.0])


def test_warmup_steps_override_their_ratio():
    assert warmup_steps(3, 0.5, 100) == 3
    assert warmup_steps(0, 0.05, 100) == 5
