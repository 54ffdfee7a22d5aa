"""Rollout corrections and gap metrics by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raising

from trinity_core.algorithms import CORRECTIONS, InputError

# ratios pi / mu of two rows; the last token of the second row is no action
RATIOS = torch.tensor([[3.0, 0.6, 1.0], [0.25, 1.2, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
ROLLOUT = torch.full((2, 3), -2.0, dtype=torch.float64)
OLD = ROLLOUT + RATIOS.log()
GEOMETRIC = math.exp(math.log(1.8) / 3)  # of row 0; row 1 has sqrt(0.3)


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("none", {}, [[1, 1, 1], [1, 1, 1]]),
        ("tis_token", {}, [[2, 0.6, 1], [0.25, 1.2, 1]]),
        ("tis_token", {"cap": 1.0}, [[1, 0.6, 1], [0.25, 1, 1]]),
        ("tis_sequence", {}, [[1.8, 1.8, 1.8], [0.3, 0.3, 1]]),
        ("tis_sequence", {"cap": 1.2}, [[1.2, 1.2, 1.2], [0.3, 0.3, 1]]),
        ("mis", {}, [[1.8, 1.8, 1.8], [0.3, 0.3, 1]]),
        ("mis", {"cap": 1.2}, [[0, 0, 0], [0.3, 0.3, 1]]),
        ("mis", {"level": "token"}, [[0, 0.6, 1], [0.25, 1.2, 1]]),
        ("icepop", {}, [[3, 0.6, 1], [0, 1.2, 1]]),
        ("icepop", {"low": 0.2, "high": 2.0}, [[0, 0.6, 1], [0.25, 1.2, 1]]),
        ("geometric", {}, [[0, 0, 0], [0, 0, 1]]),
        ("geometric", {"low": 1.0, "high": GEOMETRIC + 1e-9}, [[1, 1, 1], [0, 0, 1]]),
    ],
)
def test_weights(name, args, expected):
    weights, _ = CORRECTIONS[name](OLD, ROLLOUT, MASK, **args)
    assert weights.flatten().tolist() == pytest.approx([x for row in expected for x in row], abs=1e-12)


def test_gap_metrics():
    _, metrics = CORRECTIONS["icepop"](OLD, ROLLOUT, MASK)
    ratios = RATIOS[MASK].tolist()
    logs = [math.log(r) for r in ratios]
    assert metrics["rollout_gap/mean"] == pytest.approx(sum(map(abs, logs)) / 5)
    assert metrics["rollout_gap/max"] == pytest.approx(math.log(4))
    assert metrics["rollout_gap/k3"] == pytest.approx(sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / 5)
    assert metrics["rollout_gap/ess"] == pytest.approx(sum(ratios) ** 2 / (5 * sum(r * r for r in ratios)))
    assert metrics["rollout_gap/masked"] == pytest.approx(1 / 5)
    assert metrics["rollout_gap/weight"] == pytest.approx((3 + 0.6 + 1 + 0 + 1.2) / 5)


def test_correction_weights_have_no_gradient_and_stay_finite():
    old = OLD.clone().requires_grad_()
    for name in CORRECTIONS:
        assert not CORRECTIONS[name](old, ROLLOUT, MASK)[0].requires_grad
        weights, metrics = CORRECTIONS[name]((OLD * 0 - 1000).float(), OLD.float() * 0, MASK)
        assert weights.isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values())


def test_empty_mask_and_nan():
    empty = torch.zeros_like(MASK)
    for name in CORRECTIONS:
        weights, metrics = CORRECTIONS[name](OLD * float("nan"), ROLLOUT, empty)
        assert (weights == 1).all()
        assert metrics["rollout_gap/ess"] == 1
        with raising(InputError, key="old_logprobs"):
            CORRECTIONS[name](OLD * float("nan"), ROLLOUT, MASK)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from(sorted(CORRECTIONS)))
def test_masked_tokens_and_the_order_of_rows_do_not_matter(seed, name):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, 4, 5, generator=generator) * 0.3
    mask = torch.rand(4, 5, generator=generator) > 0.4
    weights, metrics = CORRECTIONS[name](old, rollout, mask)
    order = torch.randperm(4, generator=generator)
    noise = torch.where(mask, 0.0, torch.nan)
    changed, changed_metrics = CORRECTIONS[name]((old + noise)[order], rollout[order], mask[order])
    assert torch.equal(changed, weights[order])
    assert changed_metrics == pytest.approx(metrics)
