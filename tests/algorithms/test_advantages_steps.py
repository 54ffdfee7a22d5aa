"""GiGPO compared with values by hand, and its limits."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms.advantages import ADVANTAGES
from trinity_core.base.errors import InputError

GIGPO = ADVANTAGES["gigpo"]


def of(rewards, runs, turns, states, groups=None, **args):
    """The advantages [B] and the metrics."""
    advantages, metrics = GIGPO(
        rewards=torch.tensor(rewards),
        group_ids=groups or ["t"] * len(rewards),
        run_ids=runs,
        turns=torch.tensor(turns),
        states=states,
        mask=torch.ones(len(rewards), 1, dtype=torch.bool),
        **args,
    )
    return advantages[:, 0].tolist(), metrics


# Run 0: A → B → win (1). Run 1: A → C → lose (0). Run 2: A → A → B → win (1). gamma = 0.5.
REWARDS = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
RUNS, TURNS = [0, 0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 0, 1, 2]
STATES = ["A", "B", "A", "C", "A", "A", "B"]


def test_gigpo_by_hand_without_division():
    """Returns: 0.5 1 | 0 0 | 0.25 0.5 1. Mean in A of 0.5, 0, 0.25, 0.5 is 0.3125; in B both are 1; C occurs once."""
    got, metrics = of(REWARDS, RUNS, TURNS, STATES, gamma=0.5, step_weight=2.0, std_normalize=False)
    win, lose = 1 / 3, -2 / 3
    expected = [
        win + 2 * 0.1875, win, lose + 2 * -0.3125, lose, win + 2 * -0.0625, win + 2 * 0.1875, win,
    ]  # fmt: skip
    assert got == pytest.approx(expected, abs=1e-6)
    assert metrics["gigpo/shared_states"] == pytest.approx(6 / 7)
    assert metrics["group_advantages/reward_mean"] == pytest.approx(2 / 3)


def test_gigpo_by_hand_with_division():
    got, _ = of(REWARDS, RUNS, TURNS, STATES, gamma=0.5, epsilon=0.1)
    episode = statistics.stdev([1, 0, 1]) + 0.1
    step = statistics.stdev([0.5, 0, 0.25, 0.5]) + 0.1
    expected = [1 / 3 / episode + 0.1875 / step, 1 / 3 / episode, -2 / 3 / episode - 0.3125 / step, -2 / 3 / episode]
    assert got[:4] == pytest.approx(expected, abs=1e-6)


def test_rewards_on_the_way_count():
    """Run 0: 1 then 2 (sum 3, return 1 + 0.5 * 2 = 2); run 1: 0 then 1 (sum 1, return 0.5). Rows are not in order."""
    got, _ = of([2.0, 0.0, 1.0, 1.0], [0, 1, 0, 1], [1, 0, 0, 1], ["x", "S", "S", "y"], gamma=0.5, std_normalize=False)
    assert got == pytest.approx([1.0, -1.0 - 0.75, 1.0 + 0.75, -1.0])


def test_states_of_other_groups_are_not_compared():
    states, runs, turns = ["S"] * 4, [0, 1, 0, 1], [0, 0, 0, 0]
    got, _ = of([1.0, 0.0, 5.0, 1.0], runs, turns, states, ["a", "a", "b", "b"], std_normalize=False)
    assert got == pytest.approx([0.5 + 0.5, -0.5 - 0.5, 2.0 + 2.0, -2.0 - 2.0])


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2)), min_size=1, max_size=12))
def test_without_states_it_is_grpo_of_the_runs(rows):
    """Every row of a run gets the advantage that `grpo` gives a single-row run with the sum of the rewards."""
    rewards, runs = [reward for reward, _ in rows], [run for _, run in rows]
    turns = list(range(len(rows)))
    got, metrics = of(rewards, runs, turns, [""] * len(rows))
    names = sorted(set(runs))
    totals = torch.tensor([sum(reward for reward, run in rows if run == name) for name in names])
    plain, _ = ADVANTAGES["grpo"](
        rewards=totals, group_ids=["t"] * len(names), mask=torch.ones(len(names), 1, dtype=torch.bool)
    )
    assert got == pytest.approx([float(plain[names.index(run), 0]) for run in runs], abs=1e-4)
    assert metrics["gigpo/shared_states"] == 0
    assert got == pytest.approx(of(rewards, runs, turns, [f"{turn}" for turn in turns])[0])


def test_two_rows_of_a_turn_and_missing_states_are_refused():
    with raising(InputError, key="turns"):
        of([0.0, 1.0], [0, 0], [1, 1], ["", ""])
    with raising(InputError, key="states"):
        of([0.0, 1.0], [0, 0], [0, 1], [""])
