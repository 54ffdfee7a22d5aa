"""M2PO, Clip_B and the Jensen-Shannon advantage compared with loops of their formulas in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_core.algorithms import ADVANTAGES, InputError
from trinity_core.algorithms.clipv import expected_signals as expected_signals_of
from trinity_core.algorithms.logprobs import Head

GROUPS = {"rewards": torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), "group_ids": [0, 0, 1, 1]}


def batch(seed):
    """float64 log-probs [4, 5] before the update and at sampling, entropies, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    old, rollout = -3 * torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    entropies = 2 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) > 0.2
    mask[0, 0] = True
    return old, rollout, entropies, mask


def plain(mask):
    return ADVANTAGES["grpo"](**GROUPS, mask=mask)[0]


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.04, 0.5, 3.0]))
def test_m2po_drops_the_largest_until_the_mean_square_fits(seed, threshold):
    """Algorithm 1 by hand: repeatedly remove the largest square of the tokens that PPO might clip."""
    old, rollout, _, mask = batch(seed)
    expected = plain(mask)
    clippable = {
        (b, t): float(old[b, t] - rollout[b, t]) ** 2
        for b, t in mask.nonzero().tolist()
        if float(expected[b, t]) * float(old[b, t] - rollout[b, t]) > 0
    }
    left = dict(clippable)
    while left and statistics.fmean(left.values()) > threshold:
        del left[max(left, key=left.__getitem__)]
    for b, t in clippable.keys() - left.keys():
        expected[b, t] = 0.0
    advantages, metrics = ADVANTAGES["m2po"](
        **GROUPS, mask=mask, old_logprobs=old, rollout_logprobs=rollout, m2_threshold=threshold
    )
    assert torch.equal(advantages, expected)
    assert metrics["m2po/masked"] == pytest.approx((len(clippable) - len(left)) / int(mask.sum()))
    assert metrics["m2po/second_moment_kept"] <= threshold + 1e-12


def test_m2po_of_the_sampling_policy_is_grpo():
    old, _, _, mask = batch(1)
    advantages, metrics = ADVANTAGES["m2po"](**GROUPS, mask=mask, old_logprobs=old, rollout_logprobs=old)
    assert torch.equal(advantages, plain(mask)) and metrics["m2po/masked"] == metrics["m2po/second_moment"] == 0


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 2.5]))
def test_clipb_drops_negative_tokens_far_below_the_mean_signal(seed, mu):
    old, _, entropies, mask = batch(seed)
    signal = {
        (b, t): math.exp(float(old[b, t])) * float(entropies[b, t] + old[b, t]) for b, t in mask.nonzero().tolist()
    }
    low = statistics.fmean(signal.values()) - mu * statistics.pstdev(signal.values())
    expected = plain(mask)
    dropped = [place for place, value in signal.items() if value < low and float(expected[place]) < 0]
    for place in dropped:
        expected[place] = 0.0
    advantages, metrics = ADVANTAGES["clipb"](**GROUPS, mask=mask, old_logprobs=old, entropies=entropies, mu=mu)
    assert torch.equal(advantages, expected)
    assert metrics["clipb/masked"] == pytest.approx(len(dropped) / len(signal))


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 0.1, 1.0]))
def test_clipv_drops_negative_tokens_that_deviate_most(seed, mu, max_frac):
    old, expected_signals, entropies, mask = batch(seed)
    deviation = {
        (b, t): float(expected_signals[b, t]) - math.exp(float(old[b, t])) * float(entropies[b, t] + old[b, t])
        for b, t in mask.nonzero().tolist()
    }
    expected = plain(mask)
    above = mu * statistics.pstdev(deviation.values())
    candidates = [place for place, value in deviation.items() if value > above and float(expected[place]) < 0]
    dropped = sorted(candidates, key=deviation.__getitem__)[::-1][: max(int(max_frac * len(deviation)), 1)]
    for place in dropped:
        expected[place] = 0.0
    inputs = {"old_logprobs": old, "entropies": entropies, "expected_signals": expected_signals}
    advantages, metrics = ADVANTAGES["clipv"](**GROUPS, mask=mask, **inputs, mu=mu, max_frac=max_frac)
    assert torch.equal(advantages, expected)
    assert metrics["clipv/masked"] == pytest.approx(len(dropped) / len(deviation))


def test_clipv_drops_by_default_what_trinity_rft_drops():
    """Its `default_args`: a token that deviates by 4.4 standard deviations stays."""
    old, _, _, mask = batch(0)
    expected_signals = torch.zeros_like(old)
    row = int((plain(mask)[:, 0] < 0).nonzero()[0])
    expected_signals[row, int(mask[row].nonzero()[0])] = 1.0
    inputs = {"old_logprobs": old, "entropies": -old, "expected_signals": expected_signals}
    dropped = [ADVANTAGES["clipv"](**GROUPS, mask=mask, **inputs, **args)[1] for args in ({}, {"mu": 2.0})]
    assert [metrics["clipv/masked"] > 0 for metrics in dropped] == [False, True]


@pytest.mark.parametrize("chunk", [3, None])
def test_expected_signals_are_means_over_the_vocabulary(chunk):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (5, 11))
    temperature = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    logp = (hidden @ weight.t() / temperature[:, None]).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    expected = (logp.exp() * (logp.exp() * (entropy + logp))).sum(-1)
    torch.testing.assert_close(expected_signals_of(hidden, Head(weight), temperature, chunk), expected)


def jsd(logits, teacher, share):
    """The divergence of a policy from a teacher over all tokens, both [V]."""
    student = logits.log_softmax(-1)
    mixed = (share * teacher.exp() + (1 - share) * student.exp()).log()
    return share * (teacher.exp() * (teacher - mixed)).sum() + (1 - share) * (student.exp() * (student - mixed)).sum()


def jsd_by_enumeration(logits, teacher, share, kl_coef=1.0):
    """The gradient from the advantages of all tokens, weighted by probability, and the expected metric."""
    student = logits.log_softmax(-1)
    gradient, divergence = torch.zeros_like(logits), 0.0
    for token in range(len(logits)):
        (advantage,), metrics = ADVANTAGES["jsd"](
            mask=torch.ones(1, 1), teacher_logprobs=teacher[token].view(1, 1), kl_coef=kl_coef, lambda_coef=share,
            old_logprobs=student[token].detach().view(1, 1),
        )  # fmt: skip
        score = torch.autograd.grad(student[token], logits, retain_graph=True)[0]
        chance = student[token].detach().exp().item()
        gradient -= chance * advantage.item() * score
        divergence += chance * metrics["jsd/token"]
    return gradient, divergence


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_jsd_is_the_gradient_of_the_divergence(seed, share):
    torch.manual_seed(seed)
    teacher = torch.randn(3, dtype=torch.float64).mul(2).log_softmax(-1)
    logits = torch.randn(3, dtype=torch.float64).mul(2).requires_grad_()
    expected = jsd(logits, teacher, share)
    gradient, divergence = jsd_by_enumeration(logits, teacher, share, kl_coef=0.5)
    assert torch.allclose(gradient, 0.5 * torch.autograd.grad(expected, logits)[0], atol=1e-12)
    assert divergence == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    "name, args",
    [
        ("m2po", {"rollout_logprobs": torch.full((4, 5), float("nan"))}),
        ("clipb", {"entropies": torch.full((4, 5), float("nan"))}),
        ("clipv", {"entropies": torch.zeros(4, 5), "expected_signals": torch.full((4, 5), float("nan"))}),
    ],
)
def test_what_cannot_be_used_is_refused(name, args):
    old, _, _, mask = batch(0)
    with pytest.raises(InputError):
        ADVANTAGES[name](**GROUPS, mask=mask, old_logprobs=old, **args)
