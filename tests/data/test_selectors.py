"""What each selector draws and learns; `test_task_schedule.py` tests resumes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.base.errors import InputError
from trinity_core.config.schema.buffer import TaskSelectorConfig, TasksetConfig
from trinity_core.data.selectors import SelectorRows, check_columns, make_selector
from trinity_core.data.taskset import Taskset


def selector(name, features, seed=0, **kwargs):
    features = np.array(features, dtype=float)
    return make_selector(name, SelectorRows(len(features), features, (seed, 0)), kwargs)


def test_easy_comes_before_hard_by_each_column_in_turn():
    chosen = selector("offline_easy2hard", [[0.5, 1], [0.9, 1], [0.5, 3], [0.5, 1], [0.1, 9]])
    assert chosen.draw(0, 5, ()) == [1, 2, 0, 3, 4]
    assert chosen.draw(5, 5, ()) == [1, 2, 0, 3, 4], "the same order each epoch"


def test_priority_comes_first_and_equal_rows_are_shuffled():
    chosen = selector("priority", [[1]] * 20 + [[2]] * 20 + [[-1]])
    first, second = chosen.draw(0, 41, ()), chosen.draw(41, 41, ())
    for order in (first, second):
        assert set(order[:20]) == set(range(20, 40)) and set(order[20:40]) == set(range(20)) and order[40] == 40
    assert first != second


def test_pass_rates_follow_the_formula_without_references():
    """By hand: 1 + 8 * 0.75 = 7 passes and 1 + 8 * 0.25 = 3 failures; then 0.5 of each is forgotten."""
    chosen = selector("difficulty_based", np.empty((3, 0)), m=8, lamb=0.5)
    chosen.observe({1: 0.75})
    assert chosen.passes.tolist() == [1, 7, 1] and chosen.failures.tolist() == [1, 3, 1]
    chosen.observe({0: 0.25})
    assert chosen.passes.tolist() == [1 + 2, 0.5 * 7 + 0.5, 1]
    assert chosen.failures.tolist() == [1 + 6, 0.5 * 3 + 0.5, 1]
    assert chosen.pass_rates.tolist() == [0.3, 4 / 6, 0.5]


def test_pass_rates_of_unseen_tasks_follow_the_references():
    """BOTS with m 10, lamb 0.2, rho 0.4, by hand.

    Seen: task 0 with rate 0.5, whose references are 0.2 and 0.8; so c = 0.3 / (0.6 + 1e-6), just below 0.5, and task 1
    (0.1, 0.5) is implied to be at 0.1 + c 0.4 = 0.3. Then task 0 has 0.8 + 0.2 + 0.6 * 5 + 0.4 * 5 = 6 of each, task 1
    has 1 + 0.4 * 3 = 2.2 passes and 1 + 0.4 * 7 = 3.8 failures, task 2 (0.9, 1) 1 + 0.4 * 9.5 = 4.8 and 1.2.
    """
    chosen = selector("difficulty_based", [[0.2, 0.8], [0.1, 0.5], [0.9, 1.0]], m=10, lamb=0.2, rho=0.4)
    chosen.observe({0: 0.5})
    assert chosen.passes == pytest.approx([6, 2.2, 4.8], abs=1e-5)
    assert chosen.failures == pytest.approx([6, 3.8, 1.2], abs=1e-5)
    chosen.observe({1: 0.5})  # found: 0.4 / 0.4 = 1, so c = 0.9 * 0.5 + 0.1 * 1 = 0.55
    assert chosen.interpolation == pytest.approx(0.55, abs=1e-5)
    assert chosen.passes[0] == pytest.approx(0.8 * 6 + 0.2 + 0.4 * 10 * (0.2 + 0.55 * 0.6), abs=1e-4)
    assert chosen.passes[1] == pytest.approx(0.8 * 2.2 + 0.2 + 10 * 0.5, abs=1e-5)


def test_implied_rates_stay_within_0_and_1():
    chosen = selector("difficulty_based", [[0.1, 0.2], [0.0, 0.9]], m=10, lamb=0.0, rho=1.0)
    chosen.observe({0: 1.0})  # c is about 9: task 1 would be at 8.1
    assert chosen.passes == pytest.approx([11, 11]) and chosen.failures == pytest.approx([1, 1])


def test_a_step_without_verdicts_teaches_nothing():
    chosen = selector("difficulty_based", np.empty((2, 0)))
    chosen.observe({0: 1.0})
    before = chosen.state
    chosen.observe({})
    assert chosen.state == before


def test_greedy_draws_the_tasks_nearest_to_the_target():
    chosen = selector("difficulty_based", np.empty((6, 0)), m=98, lamb=0, tau=0, target_reward=0.7)
    chosen.observe({0: 0.0, 1: 0.2, 2: 0.71, 3: 0.64, 4: 0.9, 5: 1.0})
    assert chosen.draw(0, 3, ()) == [2, 3, 4]
    assert chosen.draw(0, 2, [2, 3]) == [4, 5], "not twice in a step"


def test_probabilities_follow_distance_and_tau():
    """Pass rates 0.5 and 0.9 at target 0.5 and tau 0.4: odds e^(0.4 / 0.4), so 0.731 of the draws."""
    chosen = selector("difficulty_based", np.empty((2, 0)), m=998, lamb=0, tau=0.4, target_reward=0.5)
    chosen.observe({0: 0.5, 1: (0.9 * 1000 - 1) / 998})
    assert chosen.pass_rates == pytest.approx([0.5, 0.9])
    share = sum(chosen.draw(start, 1, ()) == [0] for start in range(4000)) / 4000
    assert share == pytest.approx(0.731, abs=0.025)


def test_sampled_pass_rates_explore_uncertain_tasks():
    """At 0.5 after 1000 rollouts and at 0.5 after none: draws of the latter are seldom nearer to 0.5."""
    chosen = selector("difficulty_based", np.empty((2, 0)), m=1000, lamb=0, tau=0, do_sample=True)
    chosen.observe({0: 0.5})
    share = sum(chosen.draw(start, 1, ()) == [0] for start in range(1000)) / 1000
    assert share > 0.9


@given(st.integers(1, 8), st.integers(1, 30), st.sets(st.integers(0, 7)), st.sampled_from([0.0, 0.1]))
def test_draws_are_without_replacement_within_a_step(size, count, barred, tau):
    barred = sorted(row for row in barred if row < size)
    chosen = selector("difficulty_based", np.empty((size, 0)), tau=tau)
    drawn = chosen.draw(3, count, barred)
    free = size - len(barred) or size
    assert len(drawn) == count and len(set(drawn[:free])) == min(count, free)
    if free < size:
        assert not set(drawn[:free]) & set(barred)


@pytest.mark.parametrize(
    "name, count", [("shuffle", 1), ("priority", 0), ("difficulty_based", 1), ("offline_easy2hard", 0)]
)
def test_selectors_say_how_many_columns_they_read(name, count):
    with raising(InputError, key="feature_keys"):
        check_columns(name, count)


def test_rows_without_their_features_are_set_aside(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        '{"prompt": "a", "ease": 0.5}\n{"prompt": "b"}\n{"prompt": "c", "ease": "hard"}\n{"prompt": "d", "ease": "2"}\n'
    )
    chosen = TaskSelectorConfig(selector_type="priority", feature_keys=["ease"])
    read = Taskset.open(TasksetConfig(name="t", path=str(path), task_selector=chosen), 0)
    assert read.features().tolist() == [[0.5], [2.0]]
    reasons = [row.reason for row in read.rejected]
    assert len(reasons) == 2 and all("task_selector.feature_keys" in reason for reason in reasons)
    assert Taskset.open(TasksetConfig(name="t", path=str(path), task_selector=chosen), 0, is_eval=True).rejected == []
