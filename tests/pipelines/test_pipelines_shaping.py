"""Operators that change rewards and losses, on values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from raising import raising

from trinity_core.base.errors import InputError, TrinityError
from trinity_core.config.arguments import fitting
from trinity_core.config.findings import Report
from trinity_core.data.experience import Experience
from trinity_core.pipelines import OPERATORS
from trinity_core.pipelines.shaping import (
    mask_response_truncated,
    overlong_penalty,
    pass_rate_calculator,
    reward_shaping_mapper,
    taskset_balance_filter,
)


def answer(reward, group="g", run=0, tokens=2, truncated=False, **fields):
    unscored = reward is None
    mask = np.zeros(tokens, bool) if unscored else np.ones(tokens, bool)
    return Experience(
        np.arange(2 + tokens), 2, mask, reward=reward, group=group, run=run, truncated=truncated,
        turn=fields.get("turn", 0), metrics=fields.get("metrics", {}), info=fields.get("info", {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shaping", "reward"),
    [
        ({"stats_key": "quality"}, 1.5),
        ({"stats_key": "quality", "op_type": "ADD", "weight": 2.0}, 2.0),
        ({"stats_key": "quality", "op_type": "SUB", "weight": 3.0}, -0.5),
        ({"stats_key": "quality", "op_type": "MUL", "weight": 0.5}, 0.25),
        ({"stats_key": "quality", "op_type": "DIV"}, 2.0),
        ({"stats_key": "turns", "op_type": "DIV", "weight": 2}, 0.125),
    ],
)
def test_a_statistic_shapes_the_reward(shaping, reward):
    rows = [answer(1.0, info={"quality": 0.5}, metrics={"turns": 4.0}), answer(None)]
    shaped, unscored = reward_shaping_mapper(rows, [shaping])
    assert shaped.reward == reward and shaped.metrics["unshaped_reward"] == 1.0
    assert unscored.reward is None and rows[0].reward == 1.0
    twice = reward_shaping_mapper(rows, [shaping, {"stats_key": "turns", "op_type": "SUB"}])
    assert twice[0].reward == reward - 4.0


def token_rewarded(*rewards, run=0, turn=0):
    row = answer(1.0, run=run, tokens=len(rewards), metrics={"half": 0.5})
    return replace(row, reward=None, token_rewards=np.array(rewards), turn=turn)


@pytest.mark.parametrize(("op_type", "total"), [("ADD", 3.5), ("SUB", 2.5), ("MUL", 1.5), ("DIV", 6.0)])
def test_token_rewards_are_shaped_by_their_sum(op_type, total):
    [shaped] = reward_shaping_mapper([token_rewarded(1, 2)], [{"stats_key": "half", "op_type": op_type}])
    assert shaped.total_reward == total and shaped.metrics["unshaped_reward"] == 3.0


def test_a_statistic_that_is_not_there_is_named():
    with raising(TrinityError, key="qualty"):
        experience = answer(1.0, info={"quality": 1, "text": "x"}, metrics={"turns": 1.0})
        reward_shaping_mapper([experience], [{"stats_key": "qualty"}])
    assert reward_shaping_mapper([answer(1.0, info={"stars": "4.5"})], [{"stats_key": "stars"}])[0].reward == 5.5
    with raising(TrinityError, key="stars"):
        reward_shaping_mapper([answer(1.0, info={"stars": "nan"})], [{"stats_key": "stars"}])
    with raising(TrinityError, key="quality"):
        reward_shaping_mapper([answer(1.0, info={"quality": 0})], [{"stats_key": "quality", "op_type": "DIV"}])


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"reward_shaping_configs": [{"stats_key": "a", "op_type": "POW"}]}, "op_type"),
        ({"reward_shaping_configs": [{"op_type": "ADD"}]}, "stats_key"),
        ({"reward_shaping_configs": [{"stats_key": "a", "wieght": 1}]}, "wieght"),
    ],
)
def test_wrong_shapings_are_refused_at_load(args, key):
    report, name = Report(), "reward_shaping_mapper"
    fitting(OPERATORS, OPERATORS[name], name, args, "operators[0].args", report)
    assert [problem for problem in report.problems if key in problem.key]


def test_pass_rates_are_those_of_a_groups_runs():
    rows = [
        answer(5.0, "a", 0, metrics={"accuracy": 1.0}),
        answer(-1.0, "a", 1, metrics={"accuracy": 0.0}),
        answer(None, "a", 2),
        answer(3.0, "b", 0),  # no part `accuracy`: the reward, cut to 1
        answer(0.25, "b", 1),
        answer(0.75, "b", 1, turn=1),  # a later turn of that run counts for it
        answer(None, "c", 0),
    ]
    rates = [row.metrics.get("pass_rate") for row in pass_rate_calculator(rows)]
    assert rates == [0.5, 0.5, 0.5, 0.875, 0.875, 0.875, None]


def test_long_answers_are_punished_softly():
    rows = [answer(1.0, tokens=tokens) for tokens in (6, 7, 8, 10, 12)] + [answer(None)]
    rewards = [row.reward for row in overlong_penalty(rows, max_response_length=10, cache_length=4)]
    assert rewards == [1.0, 0.75, 0.5, 0.0, 0.0, None]
    assert overlong_penalty(rows, 10, 4, penalty_factor=0.5)[1].metrics["overlong_penalty"] == -0.125
    with raising(InputError, key="cache_length"):
        overlong_penalty(rows, 10, 11)


def test_cut_answers_carry_no_loss_and_keep_their_reward():
    whole, cut = mask_response_truncated([answer(1.0), answer(0.0, truncated=True)])
    assert whole.action_mask.all() and not cut.action_mask.any() and cut.reward == 0.0 and not cut.is_unscored


def balanced(names, shares=None):
    rows = [answer(1.0, f"{name}{place}", info={"taskset": name}) for place, name in enumerate(names) for _ in range(2)]
    return [row.group for row in taskset_balance_filter(rows, shares)[::2]]


def test_task_sets_are_balanced_by_whole_groups():
    assert balanced("aaabab") == ["a0", "a1", "b3", "b5"]
    assert balanced("aaabab", {"a": 1, "b": 2}) == ["a0", "b3", "b5"]
    assert balanced("aaabab", {"a": 1, "b": 0}) == ["a0", "a1", "a2", "a4"]
    assert balanced("aaabc", {"a": 1, "b": 1}) == ["a0", "b3", "c4"]
    assert balanced("aaa", {"a": 1, "b": 1}) == ["a0", "a1", "a2"]
    assert balanced("aaabb", {"a": 0.6, "b": 0.4}) == ["a0", "a1", "a2", "b3", "b4"]
    assert balanced("") == []


def test_masked_and_token_rewarded_answers_are_punished_by_sampled_tokens():
    rows = [
        replace(answer(1.0, tokens=4, truncated=True), versions=np.zeros(4)),
        replace(token_rewarded(0, 0, 0, 1), versions=[0, -1, -1, 0]),
    ]
    punished = overlong_penalty(mask_response_truncated(rows), max_response_length=4, cache_length=2)
    assert [row.total_reward for row in punished] == [0.0, 1.0]


def test_unnumbered_answers_each_count_in_a_pass_rate():
    rows = [answer(reward) for reward in (1.0, 1.0, 1.0, 1.0, 0.0)]
    assert pass_rate_calculator(rows)[0].metrics["pass_rate"] == 0.8
    rows = [token_rewarded(0, 1), token_rewarded(0, 0, run=1)]
    assert pass_rate_calculator(rows)[0].metrics["pass_rate"] == 0.5
