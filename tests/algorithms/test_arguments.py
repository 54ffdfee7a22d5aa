"""The arguments of parts have bounds and choices, which a configuration is checked against before a run."""

from __future__ import annotations

import pytest

from trinity_core.base.registry import registry_of
from trinity_core.config.arguments import fitting
from trinity_core.config.findings import Report

OUT_OF_RANGE = (
    ("policy_loss_fn", "ppo", {"clip_range": -0.1}),
    ("policy_loss_fn", "ppo", {"clip_range_high": -0.1}),
    ("policy_loss_fn", "ppo", {"clip_ratio_c": 1.0}),
    ("policy_loss_fn", "mix", {"clip_ratio_c": 0.9}),
    ("policy_loss_fn", "mix", {"mu": 1.5}),
    ("policy_loss_fn", "mix_chord", {"mu_peak": 1.5}),
    ("policy_loss_fn", "mix_chord", {"mu_valley": -0.1}),
    ("policy_loss_fn", "mix_chord", {"cutoff_prob": 0.0}),
    ("policy_loss_fn", "sapo", {"tau_pos": 0.0}),
    ("policy_loss_fn", "sapo", {"tau_neg": 0.0}),
    ("policy_loss_fn", "sppo", {"epsilon": 0.0}),
    ("policy_loss_fn", "opmd", {"tau": -1.0}),
    ("policy_loss_fn", "sft_phi", {"cutoff_prob": 0.0}),
    ("policy_loss_fn", "dpo", {"beta": 0.0}),
    ("policy_loss_fn", "dpo", {"label_smoothing": 0.9}),
    ("policy_loss_fn", "opsd", {"beta": 1.5}),
    ("advantage_fn", "m2po", {"m2_threshold": -1.0}),
    ("advantage_fn", "jsd", {"lambda_coef": 1.5}),
    ("loss_agg_mode", "seq-mean-token-sum-norm", {"normalizer": 0}),
)
UNKNOWN_CHOICES = (
    ("policy_loss_fn", "topr", {"level": "batch"}),
    ("policy_loss_fn", "rec", {"clip_mode": "round"}),
    ("policy_loss_fn", "rec", {"weight": "heavy"}),
    ("policy_loss_fn", "rec", {"regularizer": "k9"}),
    ("advantage_fn", "grpo", {"std_cal_level": "world"}),
    ("advantage_fn", "opmd", {"opmd_baseline": "median"}),
    ("advantage_fn", "rec", {"drop": "all"}),
    ("advantage_fn", "raft", {"selection": "worst"}),
    ("rollout_correction", "mis", {"level": "batch"}),
)


@pytest.mark.parametrize(
    ("code", "part", "name", "args"),
    [
        (code, *case)
        for code, cases in (("out-of-range", OUT_OF_RANGE), ("unknown-choice", UNKNOWN_CHOICES))
        for case in cases
    ],
)
def test_unsuitable_argument_is_reported(code, part, name, args):
    registry, report = registry_of(f"algorithm.{part}"), Report()
    fitting(registry, registry[name], name, args, "args", report)
    assert [(finding.key, finding.code) for finding in report.problems] == [(f"args.{key}", code) for key in args]
