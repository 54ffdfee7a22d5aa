"""KL estimators against Schulman's definitions (joschu.net/blog/kl-approx.html) in float64, and their coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import KL_FNS, InputError, KLCoefficient
from trinity_core.algorithms.kl import split_kl_args

P, Q = math.log(0.5), math.log(0.2)
D = P - Q  # log(pi / ref) = log 2.5
FORMULAS = {
    "none": 0.0,
    "k1": D,
    "k2": D * D / 2,
    "k3": 0.4 - 1 + D,  # ref / pi - 1 - log(ref / pi)
    "low_var_kl": 0.4 - 1 + D,
    "abs": abs(D),
    "corrected_k3": 0.4 - 1 + D,
}
MASK = torch.tensor([[True, True, False]])


def row(value, other=0.0):
    return torch.tensor([[value, value, other]], dtype=torch.float64)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name):
    got = KL_FNS[name](row(P, float("nan")), row(Q, float("inf")), MASK)
    assert got[0, :2].tolist() == pytest.approx([FORMULAS[name]] * 2, abs=1e-12)
    assert got[0, 2] == 0


def test_every_estimator_is_tested():
    assert set(FORMULAS) == set(KL_FNS)


def test_corrected_k3_uses_truncated_ratio_to_old_policy():
    k3 = 0.4 - 1 + D
    old = row(math.log(0.4))  # ratio 0.5 / 0.4
    assert KL_FNS["corrected_k3"](row(P), row(Q), MASK, old)[0, 0].item() == pytest.approx(1.25 * k3)
    old = row(math.log(0.1))  # ratio 5, truncated at 2
    assert KL_FNS["corrected_k3"](row(P), row(Q), MASK, old)[0, 0].item() == pytest.approx(2 * k3)
    assert KL_FNS["corrected_k3"](row(P), row(Q), MASK, old, ratio_cap=None)[0, 0].item() == pytest.approx(5 * k3)


def test_low_variance_kl_is_bounded_where_k3_overflows():
    assert KL_FNS["low_var_kl"](row(-200.0), row(0.0), MASK)[0, 0].item() == 10


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - {"none"}))
def test_gradients(name):
    torch.manual_seed(0)
    logprobs = (torch.randn(2, 3, dtype=torch.float64) - 2).requires_grad_()
    reference, old = torch.randn(2, 2, 3, dtype=torch.float64) - 2
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert torch.autograd.gradcheck(lambda x: KL_FNS[name](x, reference, mask, old, **_whole(name)), (logprobs,))


def _whole(name):
    return {"ratio_cap": None} if name == "corrected_k3" else {}


def test_mean_gradient_of_k2_is_gradient_of_kl():
    """Over a whole vocabulary, E_pi[grad k2] = grad KL(pi || ref)."""
    torch.manual_seed(1)
    logits = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(1, 6, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    every = torch.ones(1, 6, dtype=torch.bool)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    k2 = KL_FNS["k2"](logprobs, reference, every)
    assert torch.allclose(
        torch.autograd.grad((logprobs.detach().exp() * k2).sum(), logits, retain_graph=True)[0], exact
    )
    k3 = KL_FNS["corrected_k3"](logprobs, reference, every)
    assert torch.allclose(torch.autograd.grad((logprobs.detach().exp() * k3).sum(), logits)[0], exact)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=6))
def test_signs_and_zeros(pairs):
    logprobs, reference = (torch.tensor([list(side)], dtype=torch.float64) for side in zip(*pairs, strict=True))
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    for name in ("k2", "k3", "low_var_kl", "abs", "corrected_k3"):
        assert (KL_FNS[name](logprobs, reference, mask) >= 0).all(), name
    for name in KL_FNS:
        assert (KL_FNS[name](logprobs, logprobs, mask) == 0).all(), name


def test_what_cannot_be_used_is_refused():
    with raising(InputError, key="ref_logprobs"):
        KL_FNS["k1"](row(P), row(float("nan")), MASK)
    with raising(InputError, key="ref_logprobs"):
        KL_FNS["k1"](row(P), row(Q)[:, :2], MASK)


def test_adaptive_coefficient_by_hand():
    """arXiv 1909.08593, section 2.2: the proportional error is held within +-0.2."""
    kl = KLCoefficient(kl_coef=0.1, adaptive=True, target_kl=0.05, horizon=1000)
    assert kl.update(0.055, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert kl.update(1.0, 100) == pytest.approx(0.101 * 1.02)
    assert kl.update(0.0, 100) == pytest.approx(0.101 * 1.02 * 0.98)
    assert KLCoefficient(0.3).update(9.0, 100) == 0.3


def test_adaptive_coefficient_stays_positive_above_the_horizon():
    """A batch gives one measurement of the KL, which moves the coefficient by at most 20 %."""
    for experiences in (10, 15, 50, 60, 1000):
        kl = KLCoefficient(kl_coef=0.1, adaptive=True, target_kl=0.05, horizon=10)
        assert kl.update(0.0, experiences) == pytest.approx(0.1 * 0.8)
        assert kl.update(1.0, experiences) == pytest.approx(0.1 * 0.8 * 1.2)
    kl = KLCoefficient(kl_coef=0.1, adaptive=True, target_kl=0.05, horizon=10)
    assert all(kl.update(0.0, 256) > 0 for _ in range(100))


def test_adaptive_coefficient_refuses_nan_and_missing_target():
    with raising(InputError, key="target_kl"):
        KLCoefficient(adaptive=True)
    with raising(InputError, key="current_kl"):
        KLCoefficient(adaptive=True, target_kl=1.0, horizon=10).update(float("nan"), 1)


def test_kl_arguments_are_split():
    coefficient, rest = split_kl_args({"kl_coef": 0.5, "ratio_cap": None})
    assert coefficient == KLCoefficient(0.5)
    assert rest == {"ratio_cap": None}
