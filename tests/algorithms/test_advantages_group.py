"""Group advantages: values by hand, invariances, and groups without a signal."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import ADVANTAGES, ALGORITHMS, InputError, Objective
from trinity_core.algorithms.advantages.group import overlong_penalty
from trinity_core.algorithms.advantages.grouping import fill_batch, groups_with_variance

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 5.0, 3.0])
IDS = ["a", "a", "a", "b", "b", "c", "b"]  # a: 1 0 0, b: 1 2 3, c: one of its own
MASK = torch.ones(7, 2, dtype=torch.bool)
MASK[0, 1] = False
GROUP_FNS = ("grpo", "rloo", "opmd", "asymre", "rec")


def scores(name, rewards=REWARDS, ids=IDS, **args):
    advantages, _ = ADVANTAGES[name](rewards=rewards, group_ids=ids, mask=MASK, **args)
    assert advantages.shape == MASK.shape
    assert advantages.dtype == torch.float32
    assert advantages[0, 1] == 0
    assert torch.equal(advantages[1:, 0], advantages[1:, 1])
    return advantages[:, 0].tolist()


@pytest.mark.parametrize("level", ["group", "batch", "advantages"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_rewards_have_no_advantage_whatever_epsilon(level, epsilon):
    equal = scores("grpo", torch.ones(7), epsilon=epsilon, std_cal_level=level)
    assert equal == [0.0] * 7
    assert all(math.isfinite(score) for score in scores("grpo", epsilon=epsilon, std_cal_level=level))


STD_A = statistics.stdev([1, 0, 0])


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        (
            "grpo",  # arXiv 2402.03300: (r - mean) / std, the sample deviation of b is 1
            {"epsilon": 1e-6},
            [x / (STD_A + 1e-6) for x in (2 / 3, -1 / 3, -1 / 3)] + [-1 / (1 + 1e-6), 0, 0, 1 / (1 + 1e-6)],
        ),
        ("grpo", {"std_normalize": False}, [2 / 3, -1 / 3, -1 / 3, -1, 0, 0, 1]),
        (
            "grpo",
            {"std_cal_level": "batch", "epsilon": 0.0},
            [x / statistics.stdev(REWARDS.tolist()) for x in (2 / 3, -1 / 3, -1 / 3, -1, 0, 0, 1)],
        ),
        (
            "grpo",
            {"std_cal_level": "advantages", "epsilon": 0.0},
            [x / statistics.stdev([2 / 3, -1 / 3, -1 / 3, -1, 0, 1]) for x in (2 / 3, -1 / 3, -1 / 3, -1, 0, 0, 1)],
        ),
        ("grpo", {"std_threshold": STD_A + 0.01, "std_normalize": False}, [0, 0, 0, -1, 0, 0, 1]),
        ("rloo", {}, [1 - 0, 0 - 0.5, 0 - 0.5, 1 - 2.5, 2 - 2, 0, 3 - 1.5]),  # arXiv 2402.14740
        ("opmd", {}, [2 / 3, -1 / 3, -1 / 3, -1, 0, 0, 1]),
        ("asymre", {}, [2 / 3 + 0.1, -1 / 3 + 0.1, -1 / 3 + 0.1, -0.9, 0.1, 0.1, 1.1]),  # arXiv 2506.20520
        ("rec", {}, [2 / 3, -1 / 3, -1 / 3, -1, 0, 0, 1]),
        ("rec", {"std_normalize": True, "epsilon": 0.5}, [x / (STD_A + 0.5) for x in (2 / 3, -1 / 3, -1 / 3)]
         + [-1 / 1.5, 0, 0, 1 / 1.5]),
        ("reinforce", {"baseline": 0.5}, [0.5, -0.5, -0.5, 0.5, 1.5, 4.5, 2.5]),
    ],
)  # fmt: skip
def test_by_hand(name, args, expected):
    if name == "reinforce":
        got = ADVANTAGES[name](rewards=REWARDS, mask=MASK, **args)[0][:, 0].tolist()
    else:
        got = scores(name, **args)
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("grpo", {"std_normalize": False}, [2 / 3] * 3 + [-1 / 3] * 2),
        ("grpo", {"epsilon": 0.0}, [2 / 3 / STD_A] * 3 + [-1 / 3 / STD_A] * 2),
        ("grpo", {"epsilon": 0.0, "std_cal_level": "batch"}, [2 / 3 / STD_A] * 3 + [-1 / 3 / STD_A] * 2),
        ("grpo", {"epsilon": 0.0, "std_cal_level": "advantages"}, [2 / 3 / STD_A] * 3 + [-1 / 3 / STD_A] * 2),
        ("rloo", {}, [1, 1, 1, -0.5, -0.5]),
        ("opmd", {}, [2 / 3] * 3 + [-1 / 3] * 2),
        ("asymre", {}, [2 / 3 + 0.1] * 3 + [-1 / 3 + 0.1] * 2),
        ("rec", {}, [2 / 3] * 3 + [-1 / 3] * 2),
    ],
)
def test_a_rollout_of_several_rows_counts_once(name, args, expected):
    """Three rollouts with the rewards 1, 0, 0, the first of three rows: the mean is 1/3, not 3/5."""
    inputs = {"rewards": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), "mask": torch.ones(5, 1, dtype=torch.bool)}
    rollouts = ["0", "0", "0", "1", "2"]
    advantages, metrics = ADVANTAGES[name](group_ids=["t"] * 5, rollout_ids=rollouts, **inputs, **args)
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert metrics["group_advantages/reward_mean"] == pytest.approx(1 / 3)
    order = [3, 0, 4, 1, 2]  # rows of a rollout need not be adjacent, and groups have rollouts of the same name
    mixed = {key: torch.cat([value[order], value]) for key, value in inputs.items()}
    groups, ids = ["t"] * 5 + ["u"] * 5, [rollouts[i] for i in order] + rollouts
    again, _ = ADVANTAGES[name](group_ids=groups, rollout_ids=ids, **mixed, **args)
    if "std_cal_level" not in args:
        assert again[:, 0].tolist() == pytest.approx([expected[i] for i in order] + expected, abs=1e-6)


def test_scale_rl_advantages_have_a_deviation_of_one_over_groups_with_variance():
    """Neither the means of tasks nor tasks that are always or never solved count."""
    rewards = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    objective = Objective(ALGORITHMS["scale_rl"])
    groups = [row // 4 for row in range(16)]
    mask = torch.ones(16, 2, dtype=torch.bool)
    advantages = objective.advantages(mask, rewards=rewards, group_ids=groups).advantages[:, 0]
    assert float(advantages[:8].std()) == pytest.approx(1, abs=1e-5)
    assert advantages[8:].tolist() == [0.0] * 8


M = 7 / 12
"""Mean of turn rewards 1/4, 1/2, 1: a rollout that won at the third turn, discounted by 1/2. Another has M = 0."""


@pytest.mark.parametrize(
    ("name", "args", "won", "lost"),
    [
        ("grpo", {"epsilon": 0.0}, 0.5**0.5, -(0.5**0.5)),
        ("grpo", {"epsilon": 0.0, "std_cal_level": "batch"}, 0.5**0.5, -(0.5**0.5)),
        ("grpo", {"std_normalize": False}, M / 2, -M / 2),
        ("rloo", {}, M, -M),
        ("opmd", {}, M / 2, -M / 2),
        (
            "opmd",
            {"opmd_baseline": "logavgexp"},
            M - math.log((math.exp(M) + 1) / 2),
            -math.log((math.exp(M) + 1) / 2),
        ),
        ("asymre", {}, M / 2 + 0.1, -M / 2 + 0.1),
        ("rec", {}, M / 2, -M / 2),
        ("rec", {"drop": "balance"}, M / 2, -M / 2),
        ("raft", {}, 2, 0),
        ("raft", {"selection": "threshold", "threshold": 0.5}, 2, 0),
    ],
)
def test_each_row_has_its_rollouts_advantage(name, args, won, lost):
    inputs = {"rewards": torch.tensor([0.25, 0.5, 1.0, 0, 0, 0]), "mask": torch.ones(6, 1, dtype=torch.bool)}
    advantages, metrics = ADVANTAGES[name](group_ids=["t"] * 6, rollout_ids=[0, 0, 0, 1, 1, 1], **inputs, **args)
    assert advantages[:, 0].tolist() == pytest.approx([won] * 3 + [lost] * 3, abs=1e-6)
    assert metrics["group_advantages/reward_mean"] == pytest.approx(M / 2)
    assert metrics["group_advantages/reward_std"] == pytest.approx(M / 2**0.5)


@pytest.mark.parametrize("name", [*GROUP_FNS, "raft"])
def test_equal_rollouts_of_unequal_turns_have_no_advantage(name):
    rewards, rollouts = torch.tensor([0.1, 0.2, 0.7] * 4), [i // 3 for i in range(12)]
    mask = torch.ones(12, 1, dtype=torch.bool)
    advantages, metrics = ADVANTAGES[name](rewards=rewards, group_ids=["t"] * 12, mask=mask, rollout_ids=rollouts)
    assert advantages[:, 0].tolist() == pytest.approx([0.1 if name == "asymre" else 0.0] * 12)
    assert metrics["group_advantages/zero_variance_groups"] == 1
    assert not groups_with_variance(rewards, ["t"] * 12, 0.0, rollouts).any()


def test_overlong_penalty_counts_sampled_tokens_of_masked_rows():
    mask = torch.tensor([[False] * 4, [True] + [False] * 3])
    inputs = {"rewards": torch.tensor([1.0, 1.0]), "mask": mask, "group_ids": ["t"] * 2, "epsilon": 0.0}
    overlong = {"max_length": 4, "cache_length": 2}
    advantages, _ = ADVANTAGES["grpo"](lengths=torch.tensor([4, 1]), overlong=overlong, **inputs)
    assert advantages[1, 0] == pytest.approx(0.5**0.5)  # rewards 0 and 1


def test_step_wise_grpo_subtracts_penalties_of_all_turns():
    inputs = {"mask": torch.ones(4, 1, dtype=torch.bool), "group_ids": ["t"] * 4, "run_ids": [0, 0, 1, 1]}
    penalties = torch.tensor([4.0, 1.0, 0.0, 2.0])
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0]) - penalties
    advantages, _ = ADVANTAGES["step_wise_grpo"](rewards=rewards, penalties=penalties, std_normalize=False, **inputs)
    assert advantages[:, 0].tolist() == pytest.approx([-1.5, -1.5, 1.5, 1.5])  # runs: 1 - 5, 1 - 2


def test_opmd_log_mean_exp_baseline():
    """tau log mean exp(r / tau) (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    tau = 0.5
    expected = [r - tau * math.log((math.exp(1 / tau) + 2) / 3) for r in (1, 0, 0)]
    assert scores("opmd", opmd_baseline="logavgexp", tau=tau)[:3] == pytest.approx(expected, abs=1e-6)
    assert scores("opmd", opmd_baseline="logavgexp", tau=tau)[5] == pytest.approx(0, abs=1e-7)
    assert all(map(math.isfinite, scores("opmd", opmd_baseline="logavgexp", tau=1e-6)))


def test_metrics():
    _, metrics = ADVANTAGES["grpo"](rewards=REWARDS, group_ids=IDS, mask=MASK, std_threshold=0.0)
    assert metrics["group_advantages/reward_mean"] == pytest.approx((1 / 3 + 2 + 5) / 3)
    assert metrics["group_advantages/reward_std"] == pytest.approx((STD_A + 1 + 0) / 3)
    assert metrics["group_advantages/zero_variance_groups"] == pytest.approx(1 / 3)
    assert metrics["filtered_count"] == 1


def test_rec_drops_surplus_losers():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    mask = torch.ones(4, 1, dtype=torch.bool)
    advantages, metrics = ADVANTAGES["rec"](rewards=rewards, group_ids=[0] * 4, mask=mask, drop="balance")
    assert sorted(advantages[:, 0].tolist()) == [-0.5, 0.0, 0.0, 0.5]
    assert metrics["drop_balance"] == 0.5
    advantages, metrics = ADVANTAGES["rec"](
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]),
        group_ids=[0] * 4,
        rollout_ids=[0, 1, 1, 2],
        mask=mask,
        drop="balance",
    )
    assert advantages[0, 0] == 0.5 and advantages[:, 0].tolist().count(-0.5) in (1, 2)  # one loser of two is left
    assert advantages[1, 0] == advantages[2, 0]


def test_raft_weights_give_mean_over_chosen_tokens():
    mask = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    advantages, metrics = ADVANTAGES["raft"](rewards=rewards, group_ids=[0, 0, 0, 1], mask=mask)
    assert advantages.flatten().tolist() == pytest.approx([7 / 3, 7 / 3, 7 / 3, 0, 0, 0, 0, 0])
    assert metrics["raft/chosen"] == 0.5
    above, _ = ADVANTAGES["raft"](rewards=rewards, group_ids=[0, 0, 0, 1], mask=mask, selection="threshold")
    every, counted = ADVANTAGES["raft"](rewards=rewards, group_ids=[0, 0, 0, 1], mask=mask, selection="all")
    assert every.equal(mask.to(every.dtype)) and counted["raft/chosen"] == 1.0
    assert (above[3] > 0).all()
    assert (above[2] == 0).all()


def test_step_wise_groups_by_hand():
    """Two runs of two turns and one of one turn; the last turn's reward counts, the rows are not in order."""
    rewards = torch.tensor([9.0, 1.0, 0.0, 9.0, 0.0])
    advantages, _ = ADVANTAGES["step_wise_grpo"](
        rewards=rewards,
        group_ids=["t"] * 5,
        run_ids=[0, 0, 1, 1, 2],
        turns=torch.tensor([0, 1, 1, 0, 0]),
        mask=torch.ones(5, 1, dtype=torch.bool),
        std_normalize=False,
    )
    assert advantages[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3], abs=1e-6)
    normed, _ = ADVANTAGES["step_wise_grpo"](
        rewards=rewards, group_ids=["t"] * 5, run_ids=[0, 0, 1, 1, 2], turns=torch.tensor([0, 1, 1, 0, 0]),
        mask=torch.ones(5, 1, dtype=torch.bool), enable_step_norm=True, epsilon=0.0,
    )  # fmt: skip
    std = statistics.stdev([1, 0, 0])
    expected = [2 / 3 / std / 2] * 2 + [-1 / 3 / std / 2] * 2 + [-1 / 3 / std]
    assert normed[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_step_wise_grpo_of_one_turn_equals_grpo():
    mask = torch.ones(7, 1, dtype=torch.bool)
    plain, _ = ADVANTAGES["grpo"](rewards=REWARDS, group_ids=IDS, mask=mask)
    stepped, _ = ADVANTAGES["step_wise_grpo"](rewards=REWARDS, group_ids=IDS, mask=mask, run_ids=[0, 1, 2, 0, 1, 0, 2])
    assert torch.allclose(plain, stepped, atol=1e-7)
    with raising(InputError, key="turns"):
        ADVANTAGES["step_wise_grpo"](
            rewards=REWARDS, group_ids=IDS, mask=mask, run_ids=[0] * 7, turns=torch.zeros(7, dtype=torch.long)
        )


def test_overlong_penalty_by_hand():
    """DAPO, arXiv 2503.14476, eq. 13 with L_max = 10 and L_cache = 4."""
    got = overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 50]), max_length=10, cache_length=4)
    assert got.tolist() == [0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(torch.tensor([50]), 10, 4, factor=0.5).item() == -0.5
    with raising(InputError, key="cache_length"):
        overlong_penalty(torch.tensor([1]), 10, 11)


def test_overlong_penalty_applies_before_group_comparison():
    mask = torch.tensor([[True, False], [True, True]])
    advantages, _ = ADVANTAGES["grpo"](
        rewards=torch.ones(2), group_ids=[0, 0], mask=mask, std_normalize=False,
        overlong={"max_length": 2, "cache_length": 1},
    )  # fmt: skip
    assert advantages.tolist() == [[0.5, 0], [-0.5, -0.5]]


def test_batch_is_filled_with_groups_that_have_variance():
    keep = groups_with_variance(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 5.0]), IDS_7 := list("aabbccd"))
    assert keep.tolist() == [False, False, True, True, True, True, False]
    rows, full = fill_batch(keep, IDS_7, 2)
    assert (rows.tolist(), full) == ([2, 3], True)
    rows, full = fill_batch(keep, IDS_7, 5)
    assert (rows.tolist(), full) == ([2, 3, 4, 5], False)


@pytest.mark.parametrize("name", GROUP_FNS)
def test_degenerate_groups(name):
    mask = torch.ones(3, 2, dtype=torch.bool)
    rewards = torch.tensor([0.1, 0.1, 0.1])
    level = 0.1 if name == "asymre" else 0.0
    for ids in ([0, 0, 0], [0, 1, 2]):
        advantages, metrics = ADVANTAGES[name](rewards=rewards, group_ids=ids, mask=mask)
        assert advantages.flatten().tolist() == pytest.approx([level] * 6)
        assert all(map(math.isfinite, metrics.values()))
    empty, _ = ADVANTAGES[name](rewards=rewards, group_ids=[0, 0, 0], mask=mask & False)
    assert (empty == 0).all()
    none, _ = ADVANTAGES[name](rewards=rewards[:0], group_ids=[], mask=mask[:0])
    assert none.shape == (0, 2)


@pytest.mark.parametrize("name", GROUP_FNS)
def test_what_cannot_be_used_is_refused(name):
    with pytest.raises(InputError):
        ADVANTAGES[name](rewards=torch.tensor([0.0, float("nan")]), group_ids=[0, 0], mask=MASK[:2])
    with raising(InputError, key="group_ids"):
        ADVANTAGES[name](rewards=REWARDS, group_ids=[0], mask=MASK)
    with raising(InputError, key="mask"):
        ADVANTAGES[name](rewards=REWARDS, group_ids=IDS, mask=MASK[:3])


def test_logavgexp_needs_a_temperature():
    with raising(InputError, key="tau"):
        ADVANTAGES["opmd"](rewards=REWARDS, group_ids=IDS, mask=MASK, opmd_baseline="logavgexp", tau=0.0)


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 2)), min_size=1, max_size=8),
    st.sampled_from([*GROUP_FNS, "raft"]),
    st.integers(-4, 4),
    st.randoms(use_true_random=False),
)
def test_shifts_and_orders(rows, name, shift, random):
    rewards = torch.tensor([reward / 4 for reward, _ in rows])
    ids = [group for _, group in rows]
    mask = torch.ones(len(rows), 1, dtype=torch.bool)
    advantages, _ = ADVANTAGES[name](rewards=rewards, group_ids=ids, mask=mask)
    shifted = rewards + shift * torch.tensor([1.0 if group == 0 else 0.0 for group in ids])
    assert torch.allclose(ADVANTAGES[name](rewards=shifted, group_ids=ids, mask=mask)[0], advantages, atol=1e-5)
    order = random.sample(range(len(rows)), len(rows))
    permuted, _ = ADVANTAGES[name](rewards=rewards[order], group_ids=torch.tensor(ids)[order], mask=mask)
    assert torch.allclose(permuted, advantages[order], atol=1e-6)
    assert torch.isfinite(advantages).all()
