"""Aggregations compared with values by hand."""

import pytest
import torch
from raising import raising

from trinity_core.algorithms import AGGREGATIONS, InputError, aggregation

VALUES = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("token-mean", {}, (1 + 2 + 3) / 3),
        ("seq-mean-token-sum", {}, (3 + 3) / 2),
        ("seq-mean-token-mean", {}, (1.5 + 3) / 2),
        ("seq-mean-token-sum-norm", {}, (3 / 3 + 3 / 3) / 2),
        ("seq-mean-token-sum-norm", {"normalizer": 10}, (3 / 10 + 3 / 10) / 2),
    ],
)
def test_by_hand(name, args, expected):
    assert AGGREGATIONS[name](VALUES, MASK, **args).item() == pytest.approx(expected, abs=1e-7)
    weights = AGGREGATIONS[name].weights(MASK, **args)
    assert (weights * VALUES).sum().item() == pytest.approx(expected, abs=1e-6)
    assert (weights[~MASK] == 0).all()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_empty_mask_gives_zero_with_a_gradient_of_zero(name):
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    loss = AGGREGATIONS[name](values, torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert (values.grad == 0).all()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nan_at_action_token_is_reported_with_its_position(name):
    values = VALUES.clone()
    values[1, 0] = float("nan")
    with pytest.raises(InputError, match="row 1, token 0"):
        AGGREGATIONS[name](values, MASK)


def test_mask_may_be_integer_but_not_one_dimensional():
    assert AGGREGATIONS["token-mean"](VALUES, MASK.int()).item() == pytest.approx(2)
    with raising(InputError, key="mask"):
        AGGREGATIONS["token-mean"](VALUES[0], MASK[0])


def test_module_adds_a_part():
    @aggregation("token-max-weight")
    def mine(mask):
        return mask.double()

    assert AGGREGATIONS["token-max-weight"](VALUES, MASK).item() == 6
    del AGGREGATIONS["token-max-weight"]
