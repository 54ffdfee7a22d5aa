"""What `trinity replay --rollout` calls a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trinity_core.data.experience import Experience
from trinity_core.results.resample import _difference


def test_first_token_that_an_engine_samples_otherwise() -> None:
    row = Experience(np.array([9, 9, 1, 2, 3]), 2, np.ones(3, bool))
    assert _difference(row, [(0, 3)], [[1, 2, 3]]) == (None, None, None)
    assert _difference(row, [(0, 1), (2, 3)], [[1], [4]]) == (2, 3, 4)
    assert _difference(row, [(0, 3)], [[1, 2]]) == (2, 3, None)
    assert _difference(row, [(0, 3)], [[1, 2, 3, 4]]) == (3, None, 4), "it ended, and now does not"


def test_a_rollout_that_was_cut_off_may_be_longer_now() -> None:
    row = Experience(np.array([9, 9, 1, 2, 3]), 2, np.ones(3, bool))
    assert _difference(replace(row, truncated=True), [(0, 3)], [[1, 2, 3, 4]]) == (None, None, None)
    assert _difference(row, [(0, 2)], [[1, 2, 4]]) == (None, None, None), "a newer version sampled the rest"
