"""The proof after a hand-over."""

import math

import pytest

from trinity_core.errors import HandOverError
from trinity_core.sync.probe import Probe, verify_probe


def test_agreement_returns_the_gap():
    assert verify_probe([-1.0, -2.0], [-1.0, -2.00001], 1e-3) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("got", [[-1.0, -2.1], [-1.0, math.nan], [-1.0], [-1.0, -math.inf]])
def test_disagreement_stops_the_run(got):
    with pytest.raises(HandOverError):
        verify_probe([-1.0, -2.0], got, 1e-3)


def test_the_tolerance_goes_by_dtype_unless_given():
    coarse = Probe((1, 2), (-1.0,), "bfloat16")
    assert verify_probe(coarse, [-1.1]) == pytest.approx(0.1)
    with pytest.raises(HandOverError, match=r"allowed gap 0\.01"):
        verify_probe(Probe((1, 2), (-1.0,), "bfloat16", 0.01), [-1.1])
    with pytest.raises(HandOverError):
        verify_probe(Probe((1, 2), (-1.0,)), [-1.1])


def test_a_probe_survives_json():
    probe = Probe((5, 6, 7), (-0.1234567, -3.0), "float32", 1e-4)
    assert Probe.from_json(probe.to_json()) == probe


def test_a_probe_needs_matching_lengths():
    with pytest.raises(ValueError, match="2 tokens"):
        Probe((1, 2), (0.0, 0.0))
