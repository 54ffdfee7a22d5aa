"""The names of an algorithm's parts, so that a name can be checked without importing the parts (and torch)."""

from __future__ import annotations

PARTS: dict[str, tuple[str, ...]] = {
    "advantage_fn": (
        "none", "grpo", "rloo", "opmd", "asymre", "rec", "raft", "step_wise_grpo", "ppo", "reinforceplusplus",
        "reinforce", "on_policy_distill",
    ),
    "policy_loss_fn": (
        "ppo", "gspo", "cispo", "sapo", "sppo", "sft", "sft_weighted", "sft_is", "sft_phi", "dpo", "mix", "mix_chord",
        "reinforce", "importance_sampling", "opmd", "topr", "rec",
    ),
    "kl_penalty_fn": ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"),
    "kl_loss_fn": ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"),
    "entropy_loss_fn": ("none", "default", "basic", "mix"),
    "loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "sample_strategy": ("default", "fifo", "priority", "staleness_control", "mix"),
    "rollout_correction": ("none", "tis_token", "tis_sequence", "mis", "icepop", "geometric"),
}  # fmt: skip
"""Key of `algorithm` → the names that are always there. The arguments of a part stand under `<key>_args`."""
