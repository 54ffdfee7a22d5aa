"""Samples survive packing and pickling."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trinity_core.inference.requests import STOP_REASONS, Sample, SampleBatch


@st.composite
def samples(draw):
    length = draw(st.integers(0, 9))
    of = lambda dtype, values: draw(arrays.arrays(dtype, length, elements=values))  # noqa: E731
    return Sample(
        of(np.int32, st.integers(0, 1 << 30)),
        of(np.float32, st.floats(-100, 0, width=32)),
        of(np.int32, st.integers(-1, 1000)),
        draw(st.sampled_from(STOP_REASONS)),
    )


@given(st.lists(samples(), max_size=6))
def test_packing_round_trips(given_samples):
    back = pickle.loads(pickle.dumps(SampleBatch.pack(given_samples))).unpack()
    assert len(back) == len(given_samples)
    for one, other in zip(given_samples, back, strict=True):
        assert one.reason == other.reason
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
