"""The weight check: agreement, tolerance, JSON."""

import math

import pytest

from trinity_core.errors import WeightSyncError
from trinity_core.sync.weight_check import WeightCheck, verify_weights


def test_agreement_returns_the_gap():
    assert verify_weights([-1.0, -2.0], [-1.0, -2.00001], 1e-3) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("got", [[-1.0, -2.1], [-1.0, math.nan], [-1.0], [-1.0, -math.inf]])
def test_disagreement_raises(got):
    with pytest.raises(WeightSyncError):
        verify_weights([-1.0, -2.0], got, 1e-3)


def test_tolerance_depends_on_dtype_unless_given():
    coarse = WeightCheck((1, 2), (-1.0,), "bfloat16")
    assert verify_weights(coarse, [-1.1]) == pytest.approx(0.1)
    with pytest.raises(WeightSyncError, match=r"allowed gap 0\.01"):
        verify_weights(WeightCheck((1, 2), (-1.0,), "bfloat16", 0.01), [-1.1])
    with pytest.raises(WeightSyncError):
        verify_weights(WeightCheck((1, 2), (-1.0,)), [-1.1])


def test_weight_check_survives_json():
    check = WeightCheck((5, 6, 7), (-0.1234567, -3.0), "float32", 1e-4)
    assert WeightCheck.from_json(check.to_json()) == check


def test_weight_check_needs_matching_lengths():
    with pytest.raises(ValueError):
        WeightCheck((1, 2), (0.0, 0.0))
