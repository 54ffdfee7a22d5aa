"""Entropy terms and the critic's loss by hand."""

import pytest
import torch
from raising import raising

from trinity_core.algorithms import ENTROPY_LOSSES, InputError
from trinity_core.algorithms.value import value_tokens

ENTROPY = torch.tensor([[1.0, 3.0], [2.0, float("nan")]])
MASK = torch.tensor([[True, True], [True, False]])


def test_entropy_is_a_bonus():
    loss, metrics = ENTROPY_LOSSES["default"](ENTROPY, MASK, entropy_coef=0.5)
    assert loss.item() == pytest.approx(-0.5 * 2)
    assert metrics == {"entropy_loss": pytest.approx(2)}
    assert ENTROPY_LOSSES["basic"](ENTROPY, MASK)[0].item() == 0
    assert ENTROPY_LOSSES["none"](ENTROPY, MASK, entropy_coef=0.5) == (0, {})


def test_mixed_batches_count_sampled_rows_only():
    loss, metrics = ENTROPY_LOSSES["mix"](ENTROPY, MASK, is_expert=torch.tensor([True, False]), entropy_coef=1.0)
    assert loss.item() == -2
    assert metrics["entropy_loss"] == 2
    with raising(InputError, key="is_expert"):
        ENTROPY_LOSSES["mix"](ENTROPY, MASK)


def test_entropy_refuses_nan_at_an_action_token():
    with raising(InputError, key="entropy"):
        ENTROPY_LOSSES["default"](ENTROPY, torch.ones_like(MASK))


def test_value_loss_by_hand():
    """max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2."""
    values = torch.tensor([[1.0, 3.0, 9.0]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[2.0, 2.0, float("nan")]], dtype=torch.float64)
    old = torch.tensor([[0.0, 2.9, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    losses, stats = value_tokens(values, returns, mask, old, 0.5)
    # token 0: clipped to 0.5, (0.5 - 2)^2 = 2.25 > 1; token 1: not clipped, 1
    assert losses.tolist() == [pytest.approx([2.25 / 2, 1 / 2, 0])]
    clipped, mask_of_clipped = stats["critic/vf_clipfrac"]
    assert clipped[mask_of_clipped].tolist() == [True, False]
    losses.sum().backward()
    assert values.grad.tolist() == [[0.0, 1.0, 0.0]]
    plain, _ = value_tokens(values, returns, mask, values.detach(), 0.5)
    assert plain.tolist() == [[0.5, 0.5, 0.0]]
