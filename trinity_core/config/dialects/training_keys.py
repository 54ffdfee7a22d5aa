"""The algorithm and the native keys of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.dialects.data_keys import WARMUP
from trinity_core.config.dialects.verdict import (
    SILENT,
    Below,
    Cases,
    Keys,
    Rewritten,
    Spelled,
    moved,
    noted,
    refused,
    unset,
)
from trinity_core.config.schema import AlgorithmConfig, OptimizerConfig, TrainerConfig

OFFLOAD = "trainer_config.actor_rollout_ref.actor.fsdp_config"
MEGATRON = refused("Megatron does not train here, DeepSpeed does: leave this out, and set trainer.zero_stage.")
STRATEGY = Cases({"megatron": MEGATRON}, noted("DeepSpeed shards the model; see trainer.zero_stage."))
NOT_MEGATRON = noted("There is no Megatron; DeepSpeed shards the model; see trainer.zero_stage.", {})
EXACT = noted("The loss does not depend on micro-batches.", False, True)
ADAMW = refused("AdamW is the only optimizer.", "adam", "adamw", "AdamW")
SCHEDULE = noted(
    "The learning rate has a warm-up, a course and an end: warmup_style, min_lr_ratio.", 0.0, 0, "constant"
)
FROM_BATCH = noted("It follows from the batch itself.")
CLIP_B = refused(
    "it clips by the entropy of each token, which advantages do not see here (Trinity-RFT patches its trainer for it); "
    "write grpo, and see entropy_loss_fn."
)
CORRECTIONS = {"none": "none", "token": "tis_token", "sequence": "tis_sequence"}


def correction(given: Any, _: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A section about rollout correction as the name of one and its arguments."""
    if not isinstance(given, Mapping):
        return None
    bypasses = given.get("bypass_mode") is True and given.get("loss_type", "ppo_clip") == "ppo_clip"
    if bypasses and given.get("rollout_is") is None:
        return {"/algorithm.rollout_correction": "bypass"}
    if "rollout_is" not in given:
        return {}
    asked = "none" if given["rollout_is"] is None else given["rollout_is"]
    name = CORRECTIONS.get(asked, asked) if isinstance(asked, str) else asked
    cap = None if name == "none" else given.get("rollout_is_threshold")
    return {"/algorithm.rollout_correction": name, "/algorithm.rollout_correction_args.cap": cap}


def betas(_: Any, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Two keys as one."""
    return {"betas": [optimizer.get("beta1", 0.9), optimizer.get("beta2", 0.999)]}


OPTIMIZER: Keys = {
    "lr_warmup_steps": unset(-1),
    "min_lr_ratio": unset(),
    "warmup_style": unset(),
    "lr_scheduler_type": moved("warmup_style"),
    "optimizer_type": ADAMW,
    "clip_grad": noted("See trainer.grad_clip."),
    "beta1": Rewritten(betas),
    "beta2": Rewritten(betas),
    **dict.fromkeys(("lr_warmup_init", "lr_decay_steps", "lr_decay_style", "min_lr"), SCHEDULE),
}
LOSS_ARGS = Below(
    {
        "loss_agg_mode": moved("../loss_agg_mode"),
        "sft_loss_agg_mode": noted("Both terms of mix are aggregated as algorithm.loss_agg_mode says.", "token-mean"),
        "use_token_level_loss_in_sft": noted("Both terms of mix are aggregated as algorithm.loss_agg_mode says.", True),
        **dict.fromkeys(
            (
                "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer",
                "repeat_times", "train_batch_size_expert", "train_batch_size_usual", "read_batch_size_expert",
                "read_batch_size_usual",
            ),
            FROM_BATCH,
        ),
    }
)  # fmt: skip
ADVANTAGE_ARGS = Below(
    {
        "omega": moved("step_weight"),
        "fnorm": moved("std_normalize", convert=lambda kind, _: kind == "std"),
    }
)
ALGORITHM: Keys = {
    "algorithm_type": Spelled({"grpo_verl": "grpo"}),
    "advantage_fn": Cases({"clipb": CLIP_B}, SILENT),
    "add_strategy": moved("advantage_fn"),
    "add_strategy_args": moved("advantage_fn_args"),
    "mu": moved("policy_loss_fn_args.mu"),
    "gamma": moved("advantage_fn_args.gamma"),
    "lam": moved("advantage_fn_args.lam"),
    "use_token_level_loss": refused("write loss_agg_mode, such as seq-mean-token-mean.", True),
    "enable_router_replay": refused("the experts' choice is not replayed in training.", False),
    "bypass_old_logprobs": Rewritten(lambda asked, _: {"rollout_correction": "bypass"} if asked is True else {}),
    "rollout_correction": Rewritten(correction),
    "sample_strategy": Spelled({"warmup": "default"}),
    "policy_loss_fn_args": LOSS_ARGS,
    "advantage_fn_args": ADVANTAGE_ARGS,
}
TRAINER: Keys = {
    "trainer_strategy": STRATEGY,
    "enable_preview": noted("Rollouts are always recorded; monitor.traces_per_step is how many MLflow shows.", True),
    "max_token_len_per_gpu": unset(),
    "ppo_max_token_len_per_gpu": moved("max_token_len_per_gpu"),
    "max_checkpoints_to_keep": unset(0),
    "actor_grad_clip": moved("grad_clip", yields=True),
    "actor_clip_ratio": moved("/algorithm.policy_loss_fn_args.clip_range"),
    "actor_entropy_coef": moved("/algorithm.entropy_loss_fn_args.entropy_coef"),
    "actor_kl_loss_coef": moved("/algorithm.kl_loss_fn_args.kl_coef"),
    "actor_use_kl_loss": moved("/algorithm.kl_loss_fn", unset=(True,), convert=lambda used, _: used or "none"),
    "use_remove_padding": noted("Micro-batches never hold more padding than their rows' difference in length.", True),
    "balance_batch": noted("Workers always get rows of about equal total length.", True),
    "fix_actor_microbatch_loss_scale": EXACT,
    "critic_warmup": moved("trainer_config.trainer.critic_warmup"),
    "param_offload": moved(
        f"{OFFLOAD}.param_offload", "trainer_config.actor_rollout_ref.ref.fsdp_config.param_offload",
        "trainer_config.critic.model.fsdp_config.param_offload", yields=True,
    ),
    "optimizer_offload": moved(
        f"{OFFLOAD}.optimizer_offload", "trainer_config.critic.model.fsdp_config.optimizer_offload", yields=True
    ),
    "grad_offload": noted("Gradients are kept on the GPU.", False),
    "offload_policy": noted("See param_offload.", False),
    "megatron": Below({}, NOT_MEGATRON),
    "trust_remote_code": moved("/model.trust_remote_code", yields=True),
    "algorithm_type": moved("/algorithm.algorithm_type"),
    "eval_interval": moved("/explorer.eval_interval"),
    "sft_warmup_steps": WARMUP,
    "sft_warmup_iteration": WARMUP,
    "get_exp_strategy": noted("See algorithm.sample_strategy."),
}  # fmt: skip

KEYS: Mapping[type[Any], Keys] = {
    AlgorithmConfig: ALGORITHM,
    OptimizerConfig: OPTIMIZER,
    TrainerConfig: TRAINER,
}
