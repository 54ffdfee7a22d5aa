"""The weight check: agreement, tolerance, JSON."""

import math

import pytest

from trinity_core.base.errors import WeightSyncError
from trinity_core.exchange.sync.weight_check import WeightCheck, verify_weights

CHECK = WeightCheck((1, 2, 3), (-1.0, -2.0))


def test_agreement_returns_the_gap():
    assert verify_weights(CHECK, [-1.0, -2.00001]) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("got", [[-1.0, -2.1], [-1.0, math.nan], [-1.0], [-1.0, -math.inf]])
def test_disagreement_raises(got):
    with pytest.raises(WeightSyncError):
        verify_weights(CHECK, got)


@pytest.mark.parametrize("trainer, engine", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_tolerance_is_that_of_the_coarser_dtype(trainer, engine):
    assert verify_weights(WeightCheck((1, 2), (-1.0,), trainer), [-1.1], engine) == pytest.approx(0.1)
    with pytest.raises(WeightSyncError):
        verify_weights(WeightCheck((1, 2), (-1.0,)), [-1.1])


@pytest.mark.parametrize(
    ("gaps", "refused"),
    [([0.7, 0.01, 0.02, 0.03], True), ([0.7, *[0.02] * 9], False), ([0.2] * 8, False), ([math.nan, *[0.0] * 9], True)],
)
def test_single_tokens_may_differ_where_digests_agree(gaps, refused):
    """In bfloat16: 0.5 nats, and a mean of an eighth."""
    check = WeightCheck(tuple(range(len(gaps) + 1)), (-1.0,) * len(gaps), "bfloat16")
    got = [-1.0 - gap for gap in gaps]
    if refused:
        with pytest.raises(WeightSyncError):
            verify_weights(check, got, "bfloat16", digests_agree=True)
    else:
        assert verify_weights(check, got, "bfloat16", digests_agree=True) == pytest.approx(max(gaps))
    if max(gaps) > 0.5:
        with pytest.raises(WeightSyncError):
            verify_weights(check, got, "bfloat16")


def test_weight_check_needs_matching_lengths():
    with pytest.raises(ValueError):
        WeightCheck((1, 2), (0.0, 0.0))
