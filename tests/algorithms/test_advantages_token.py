"""GAE, discounted returns and distillation against loops written from the papers' formulas in float64."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import ADVANTAGES, InputError
from trinity_core.algorithms.tensors import whiten


def gae_reference(rewards, values, mask, gamma, lam):
    """arXiv 1506.02438, eq. 16, as the sum over later action tokens of (gamma lam)^l delta."""
    result = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        steps = [t for t, on in enumerate(row) if on]
        deltas = [
            rewards[b][t] + gamma * (values[b][steps[i + 1]] if i + 1 < len(steps) else 0.0) - values[b][t]
            for i, t in enumerate(steps)
        ]
        for i, t in enumerate(steps):
            result[b][t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return result


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_is_the_papers_sum(seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) > 0.3
    advantages, _, returns = ADVANTAGES["ppo"](
        token_rewards=rewards, values=values, mask=mask, gamma=gamma, lam=lam, whiten_advantages=False
    )
    by_loop = gae_reference(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    expected = torch.tensor(by_loop, dtype=torch.float64)
    assert torch.allclose(advantages, expected, atol=1e-12)
    assert torch.allclose(returns, torch.where(mask, expected + values, 0.0), atol=1e-12)


def test_gae_by_hand_with_the_sequence_reward_at_its_last_action():
    """gamma = lam = 1: advantage = reward still to come - value."""
    mask = torch.tensor([[True, False, True, False]])
    values = torch.tensor([[0.25, float("nan"), 0.5, float("nan")]])
    advantages, metrics, returns = ADVANTAGES["ppo"](
        rewards=torch.tensor([1.0]), values=values, mask=mask, whiten_advantages=False
    )
    assert advantages.tolist() == [[0.75, 0, 0.5, 0]]
    assert returns.tolist() == [[1, 0, 1, 0]]
    assert metrics == {"advantages/mean": 0.625, "returns/mean": 1, "values/mean": 0.375}


def test_whitening():
    values = torch.tensor([[1.0, 2.0, float("nan")], [6.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    deviation = math.sqrt(statistics.variance([1, 2, 6]) + 1e-8)
    assert whiten(values, mask)[mask].tolist() == pytest.approx([x / deviation for x in (-2, -1, 3)])
    assert (whiten(torch.full((2, 3), 0.1), mask) == 0).all()
    assert (whiten(values, mask & False) == 0).all()


def test_gae_is_whitened_and_returns_are_not():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 4, 6)
    mask = torch.rand(4, 6) > 0.2
    advantages, _, returns = ADVANTAGES["ppo"](token_rewards=rewards, values=values, mask=mask)
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[mask].std().item() == pytest.approx(1, abs=1e-6)
    assert advantages[~mask].abs().sum() == 0
    raw, _, same = ADVANTAGES["ppo"](token_rewards=rewards, values=values, mask=mask, whiten_advantages=False)
    assert torch.equal(returns, same)
    assert not torch.allclose(raw, advantages)


def test_reinforce_plus_plus_by_hand():
    """G_t = r_t + gamma G_{t+1} (arXiv 2501.03262), then whitened over the batch."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = torch.tensor([[0.0, 1.0, 7.0], [0.5, 0.0, -1.0]])
    returns = [0.5, 1.0, 0.5 - 0.25, -0.5, -1.0]  # gamma = 0.5
    mean, deviation = statistics.mean(returns), math.sqrt(statistics.variance(returns) + 1e-8)
    advantages, metrics = ADVANTAGES["reinforceplusplus"](token_rewards=rewards, mask=mask, gamma=0.5)
    assert advantages[mask].tolist() == pytest.approx([(g - mean) / deviation for g in returns], abs=1e-6)
    assert metrics["returns/mean"] == pytest.approx(mean)
    alone, _ = ADVANTAGES["reinforceplusplus"](rewards=torch.tensor([3.0]), mask=torch.ones(1, 1, dtype=torch.bool))
    assert alone.tolist() == [[0.0]]


def test_distillation_is_teacher_minus_student():
    mask = torch.tensor([[True, True], [True, False]])
    teacher, student = torch.tensor([[-1.0, -3.0], [-2.0, 0.0]]), torch.tensor([[-2.0, -1.0], [-2.5, float("nan")]])
    advantages, metrics = ADVANTAGES["on_policy_distill"](
        teacher_logprobs=teacher, old_logprobs=student, mask=mask, kl_coef=0.5
    )
    assert advantages.tolist() == [[0.5, -1.0], [0.25, 0.0]]
    assert metrics["kl/mean"] == pytest.approx((1 - 0.5) / 2)
    assert metrics["kl/std"] == pytest.approx(statistics.stdev([1, -0.5]))
    assert metrics["kl/token"] == pytest.approx((-1 + 2 - 0.5) / 3)


def test_distillation_measures_no_row_without_action_tokens():
    mask = torch.tensor([[True, True], [False, False]])
    inputs = {"teacher_logprobs": torch.full((2, 2), -1.0), "old_logprobs": torch.full((2, 2), -3.0)}
    metrics = ADVANTAGES["on_policy_distill"](**inputs, mask=mask)[1]
    assert metrics == {"kl/mean": -4.0, "kl/std": 0.0, "kl/token": -2.0}
    assert ADVANTAGES["on_policy_distill"](**inputs, mask=mask & False)[1] == {}


def test_empty_and_unusable_inputs():
    empty, one = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3)
    advantages, metrics, returns = ADVANTAGES["ppo"](token_rewards=one, values=one * float("nan"), mask=empty)
    assert (advantages == 0).all()
    assert (returns == 0).all()
    assert all(map(math.isfinite, metrics.values()))
    with raising(InputError, key="values"):
        ADVANTAGES["ppo"](token_rewards=one, values=one * float("nan"), mask=~empty)
    with raising(InputError, key="token_rewards"):
        ADVANTAGES["ppo"](values=one, mask=~empty)
    with raising(InputError, key="token_rewards"):
        ADVANTAGES["reinforceplusplus"](token_rewards=one * float("inf"), mask=~empty)
    with pytest.raises(InputError, match="row 0"):
        ADVANTAGES["reinforce"](rewards=torch.tensor([float("nan"), 0.0]), mask=~empty)
    with raising(InputError, key="teacher_logprobs"):
        ADVANTAGES["on_policy_distill"](teacher_logprobs=one * float("nan"), old_logprobs=one, mask=~empty)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(["ppo", "reinforceplusplus"]))
def test_masked_tokens_and_the_order_of_rows_do_not_matter(seed, name):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 4, 5, generator=generator)
    mask = torch.rand(4, 5, generator=generator) > 0.4
    inputs = {"token_rewards": rewards, "mask": mask} | ({"values": values} if name == "ppo" else {})
    advantages = ADVANTAGES[name](**inputs)[0]
    order = torch.randperm(4, generator=generator)
    noise = torch.where(mask, 0.0, torch.nan)
    changed = {key: (value if key == "mask" else value + noise)[order] for key, value in inputs.items()}
    assert torch.allclose(ADVANTAGES[name](**changed)[0], advantages[order], atol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_every_advantage_is_called_alike(name):
    """rewards, group_ids and mask by name, plus any other inputs; floats as metrics, no gradient."""
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    logprobs = torch.full((3, 2), -1.0, requires_grad=True)
    extra = {
        "ppo": {"values": logprobs},
        "on_policy_distill": {"teacher_logprobs": logprobs, "old_logprobs": logprobs},
        "jsd": {"teacher_logprobs": logprobs, "old_logprobs": logprobs},
        "m2po": {"rollout_logprobs": logprobs, "old_logprobs": logprobs},
        "clipb": {"entropies": logprobs, "old_logprobs": logprobs},
        "clipv": {"entropies": logprobs, "old_logprobs": logprobs, "expected_signals": logprobs},
        "step_wise_grpo": {"run_ids": [0, 1, 2]},
        "gigpo": {"run_ids": [0, 1, 2]},
        "clip_cov": {"old_logprobs": logprobs},
        "kl_cov": {"old_logprobs": logprobs},
        "high_entropy": {"entropies": logprobs},
        "remax": {"numbers": [{"greedy_reward": 1.0}] * 3},
        "gdpo": {"numbers": [{"right": 0.0}, {"right": 1.0}, {"right": 2.0}], "weights": {"right": 1.0}},
    }
    result = ADVANTAGES[name](
        rewards=torch.tensor([0.0, 1.0, 2.0]), group_ids=torch.tensor([4, 4, 9]), mask=mask, **extra.get(name, {})
    )
    assert result[0].shape == mask.shape
    assert result[0].dtype == torch.float32
    assert not result[0].requires_grad
    assert result[0][0, 1] == 0
    assert all(isinstance(value, float) for value in result[1].values())
    assert len(result) == {"ppo": 3, "kl_cov": 4}.get(name, 2)
