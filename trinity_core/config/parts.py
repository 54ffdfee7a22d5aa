"""Names and arguments of an algorithm's parts, so that both can be checked without importing the parts (and torch)."""

from __future__ import annotations

from typing import Any, Literal

Arguments = dict[str, Any]
"""Name of an argument → its type, or the arguments within it."""

_Level = Literal["sequence", "token"]
_SPREAD: Arguments = {
    "epsilon": float, "std_normalize": bool, "std_cal_level": Literal["group", "batch"], "std_threshold": float | None,
}  # fmt: skip
_OVERLONG: Arguments = {"max_length": int, "cache_length": int, "factor": float}
_RANGES: Arguments = {"clip_range": float, "clip_range_low": float | None, "clip_range_high": float | None}
_CLIP: Arguments = {**_RANGES, "clip_ratio_c": float | None}
_REC: Arguments = {
    "clip_mode": Literal["none", "one-side", "gspo-one-side", "two-side", "ring"],
    "weight": Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"],
    "epsilon_low": float, "epsilon_high": float, "epsilon_low_prime": float, "epsilon_high_prime": float,
    "regularizer": Literal["none", "k2", "forward-kl"], "regularizer_coef": float, "temp": float,
}  # fmt: skip
_CHORD: Arguments = {
    "mu_warmup_steps": int, "mu_decay_steps": int, "mu_peak": float, "mu_valley": float, "enable_phi_function": bool,
    "cutoff_prob": float,
}  # fmt: skip
_ENTROPY: Arguments = {"entropy_coef": float}
_KL: Arguments = {"kl_coef": float, "adaptive": bool, "target_kl": float | None, "horizon": float | None}
_KL_FNS: dict[str, Arguments] = {
    **dict.fromkeys(("none", "k1", "k2", "k3", "low_var_kl", "abs"), _KL),
    "corrected_k3": {**_KL, "ratio_cap": float | None},
}

PARTS: dict[str, dict[str, Arguments]] = {
    "advantage_fn": {
        "none": {},
        "grpo": {**_SPREAD, "overlong": _OVERLONG},
        "rloo": {},
        "opmd": {"opmd_baseline": Literal["mean", "logavgexp"], "tau": float},
        "asymre": {"baseline_shift": float},
        "rec": {"epsilon": float, "std_normalize": bool, "drop": Literal["none", "balance"] | None, "seed": int},
        "raft": {"selection": Literal["best", "threshold"], "threshold": float},
        "step_wise_grpo": {**_SPREAD, "enable_step_norm": bool},
        "ppo": {"gamma": float, "lam": float, "whiten_advantages": bool},
        "reinforceplusplus": {"gamma": float},
        "reinforce": {"baseline": float},
        "on_policy_distill": {"kl_coef": float},
    },
    "policy_loss_fn": {
        "ppo": {**_CLIP, "log_ratio_cap": float},
        "gspo": _RANGES,
        "cispo": {"clip_range_low": float, "clip_range_high": float, "mask_clipped": bool},
        "sapo": {"tau_pos": float, "tau_neg": float},
        "sppo": {"epsilon": float},
        "sft": {},
        "sft_weighted": {},
        "sft_is": {},
        "sft_phi": {"cutoff_prob": float},
        "dpo": {"beta": float, "label_smoothing": float},
        "mix": {"mu": float, **_CLIP},
        "mix_chord": {**_CHORD, **_CLIP},
        "reinforce": {},
        "importance_sampling": {},
        "opmd": {"tau": float},
        "topr": {"advantage_threshold": float, "level": _Level},
        "rec": _REC,
    },
    "kl_penalty_fn": _KL_FNS,
    "kl_loss_fn": _KL_FNS,
    "entropy_loss_fn": dict.fromkeys(("none", "default", "basic", "mix"), _ENTROPY),
    "loss_agg_mode": {
        "token-mean": {},
        "seq-mean-token-sum": {},
        "seq-mean-token-mean": {},
        "seq-mean-token-sum-norm": {"normalizer": float | None},
    },
    "sample_strategy": {
        "default": {},
        "fifo": {},
        "priority": {"reuse_cooldown_time": float | None, "decay": float},
        "staleness_control": {"max_staleness": int},
        "mix": {"expert_data_ratio": float, "inner": Literal["default", "fifo", "priority", "staleness_control"]},
    },
    "rollout_correction": {
        "none": {},
        "tis_token": {"cap": float},
        "tis_sequence": {"cap": float},
        "mis": {"cap": float, "level": _Level},
        "icepop": {"low": float, "high": float},
        "geometric": {"low": float, "high": float},
    },
}
"""Key of `algorithm` → what is always there, and its arguments, which stand under `<key>_args`."""
