"""The first step's rollout gap: what is plausible for each number format, and what ends a run."""

from __future__ import annotations

import math

import pytest
from raising import raising

from trinity_core.errors import TrinityError
from trinity_core.training.trainer import check_first_gap

FP8 = {"explorer__rollout_model__extra_engine_args__quantization": "fp8", "cluster__gpu_per_node": 1}


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "plausible", "implausible"),
    [
        ({}, False, 1e-4, 0.02),
        ({}, True, 0.02, 0.2),
        ({"trainer__dtype": "bfloat16"}, False, 0.02, 0.2),
        (FP8, True, 0.2, 0.5),
        ({"algorithm__max_rollout_gap": 2}, False, 1.9, 2.1),
        ({}, False, 0.0, math.nan),
    ],
)
def test_an_implausible_gap_ends_the_run(make_config, overrides, on_gpu, plausible, implausible):
    config = make_config(**{"algorithm__max_rollout_gap": "null"} | overrides)
    check_first_gap({"rollout_gap/mean": plausible, "staleness/max": 0.0}, config, on_gpu)
    with raising(TrinityError, key="algorithm.max_rollout_gap"):
        check_first_gap({"rollout_gap/mean": implausible, "staleness/max": 0.0}, config, on_gpu)


def test_rows_of_other_versions_and_batches_without_a_gap_are_not_judged(make_config):
    check_first_gap(
        {"rollout_gap/mean": 9.0, "staleness/max": 1.0}, make_config(algorithm__max_rollout_gap="null"), False
    )
    check_first_gap({"rollout_gap/mean": 9.0}, make_config(algorithm__max_rollout_gap="null"), False)
    check_first_gap({"skipped_step": 1.0}, make_config(algorithm__max_rollout_gap="null"), False)
