"""veRL's training keys: what `trainer.trainer_config` may contain besides the settings of `schema/verl.py`.

`import_verl/keys.py` has the counterparts of the rest of a veRL run, which only `import-verl` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.foreign.key_action import (
    SILENT,
    Below,
    Cases,
    Keys,
    Moved,
    Noted,
    Refused,
    Rewritten,
    disabled,
    follows,
    moved,
    noted,
    refused,
    silent,
    unset,
)
from trinity_core.config.foreign.run_keys import BETAS, OPTIMIZER_NAMES, SCHEDULE, STRATEGY, correction
from trinity_core.config.schema import VerlConfig
from trinity_core.config.schema import verl as schema

_HYDRA = silent("_target_")
_OF_OPTIMIZER = "/algorithm.optimizer.*"
_ENTROPY = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing"


def _adapter(rank: Any, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    targets = model.get("target_modules") or "all-linear"
    path, alpha = model.get("lora_adapter_path"), model.get("lora_alpha", 16)
    adapter = {"path": path, "lora_rank": rank, "lora_alpha": alpha, "target_modules": targets}
    excluded = model.get("exclude_modules")
    return [adapter | ({"exclude_modules": excluded} if excluded else {})]


def _steps(steps: Any, _: Mapping[str, Any]) -> Any:
    """Return None for veRL's negative number of warm-up steps, which means "not given"."""
    return None if isinstance(steps, int | float) and steps < 0 else steps


_ROOT: Keys = {
    **_HYDRA,
    "algorithm": Below({"rollout_correction": Rewritten(correction)}, Noted()),
    **noted("data skip enable_preview"),
    **noted("global_profiler ray_kwargs", {}, ""),
    **disabled("reward_model transfer_queue"),
    "reward": Below(disabled("reward_model"), Noted()),
    "custom_reward_function": Below(refused("path"), SILENT),
    **disabled("distillation", switch="enabled"),
    **silent("sandbox_fusion synchronizer"),
}
_ACTOR_ROLLOUT_REF: Keys = {
    **_HYDRA,
    **noted("rollout nccl_timeout"),
    **noted("hybrid_engine", True),
    **silent("synchronizer explorer_name"),
}
_ANY_MODEL: Keys = {
    **_HYDRA,
    **noted("use_remove_padding", True),
    **noted("use_fused_kernels fused_kernel_options use_liger", False, {}),
    **noted("external_lib tokenizer_path hf_config_path"),
    **noted("use_shm", False),
    **disabled("tiled_mlp", switch="enabled"),
    **disabled("mtp"),
    **refused("enable_activation_offload", False),
    **refused("rope_scaling rope_theta"),
    **disabled("lora", 0, switch="rank"),
}
_MODEL: Keys = {
    **_ANY_MODEL,
    **moved("enable_gradient_checkpointing", "/trainer.gradient_checkpointing", yields=True),
    **moved("trust_remote_code custom_chat_template", "/model.*", yields=True),
    **moved("path", "/model.model_path", unset=("",), yields=True),
    **moved("lora_rank", "/model.lora_configs", unset=(0,), convert=_adapter, yields=True),
    **silent("lora_alpha target_modules exclude_modules lora_adapter_path"),  # parts of lora_rank's entry
}
_CRITIC_MODEL: Keys = {
    **_ANY_MODEL,
    **moved("path", "/model.critic_model_path", yields=True),
    **noted("trust_remote_code"),
    **refused("lora_rank", 0),
    **silent("custom_chat_template lora_alpha target_modules exclude_modules lora_adapter_path"),
}
_FSDP: Keys = {
    **_HYDRA,
    "strategy": STRATEGY,
    **noted("use_torch_compile model_dtype dtype mixed_precision"),
    **noted(
        "wrap_policy fsdp_size forward_prefetch offload_policy reshard_after_forward use_orig_params min_num_params",
        -1, False, 0, {"min_num_params": 0},
    ),
    **noted(_ENTROPY, False, True),
    **noted("pad_to_length pad_to_length_bucket", True),
    **disabled("qat"),
    **silent("seed full_determinism forward_only ulysses_sequence_parallel_size"),
}  # fmt: skip
_OPTIM: Keys = {
    **_HYDRA,
    **moved("lr_scheduler_type", "warmup_style"),
    **refused("optimizer", *OPTIMIZER_NAMES),
    **refused("override_optimizer_config", {}),
    **refused("num_cycles", 0.5),
    **noted("optimizer_impl", "torch.optim"),
    **noted("total_training_steps", -1),
    **noted("clip_grad"),
    **noted(
        "lr_warmup_init lr_decay_steps lr_decay_style min_lr weight_decay_incr_style lr_wsd_decay_steps", *SCHEDULE
    ),
    **BETAS,
    **silent("zero_indexed_step use_checkpoint_opt_param_scheduler lr_wsd_decay_style"),
}
_ACTOR_OPTIM: Keys = {
    **_OPTIM,
    **moved("lr weight_decay betas lr_warmup_steps_ratio min_lr_ratio warmup_style", _OF_OPTIMIZER, yields=True),
    **moved("lr_warmup_steps", _OF_OPTIMIZER, convert=_steps, yields=True),
}
_WORKER: Keys = {
    **_HYDRA,
    "strategy": STRATEGY,
    "router_replay": Below(refused("mode", "disabled"), SILENT),
    **disabled("qat"),
    **noted("megatron", {}),
    **noted("rollout_n loss_scale_factor loss_agg_mode use_torch_compile"),
    **noted("data_loader_seed", False),
    **noted("profiler profile", {}, ""),
    **noted("pad_to_length use_remove_padding", True),
    **noted(_ENTROPY, False, True),
    **silent("load_weight"),
}
_ACTOR: Keys = {
    **_WORKER,
    **moved("use_dynamic_bsz grad_clip ulysses_sequence_parallel_size", "/trainer.*", yields=True),
    **moved("ppo_max_token_len_per_gpu", "/trainer.max_token_len_per_gpu", yields=True),
    **refused("freeze_vision_tower", False),
    **noted("use_fused_kernels", False, {}),
    **noted("shuffle", False),
    **noted("fix_actor_microbatch_loss_scale", False, True),
    **noted(
        "ppo_micro_batch_size ppo_mini_batch_size clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos "
        "tau_neg policy_loss entropy_coeff calculate_entropy calculate_sum_pi_squared use_kl_loss kl_loss_coef "
        "kl_loss_type use_prefix_grouper alg_type tau opmd_baseline use_uid"
    ),
}
_REF: Keys = {
    **_WORKER,
    **noted("log_prob_micro_batch_size log_prob_use_dynamic_bsz ulysses_sequence_parallel_size checkpoint"),
}
_CRITIC: Keys = {
    **_WORKER,
    **noted(
        "enable ppo_micro_batch_size ppo_mini_batch_size ulysses_sequence_parallel_size checkpoint nccl_timeout "
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu"
    ),
    **noted("shuffle", False),
    **unset("ppo_epochs", 0),
    **unset("cliprange_value", 0.0, 0),
    **moved("fsdp", "model.fsdp_config", yields=True),
    **follows("ray_namespace"),
}
_RESUMED: Keys = {
    "auto": SILENT,
    "disable": Moved(("/continue_from_checkpoint",), convert=lambda *_: False, yields=True),
}
_TRAINER: Keys = {
    **_HYDRA,
    **moved("max_actor_ckpt_to_keep", "/trainer.max_checkpoints_to_keep", yields=True),
    **moved("total_training_steps", "/buffer.total_steps", yields=True),
    **moved("val_before_train", "/explorer.eval_on_startup", yields=True),
    "resume_mode": Cases(_RESUMED, Refused()),
    **refused("resume_from_path", ""),
    **refused("val_only", False),
    **noted("balance_batch", True),
    **noted("remove_previous_ckpt_in_save del_local_ckpt_after_load", False),
    **noted("device", "cuda"),
    **noted(
        "project_name experiment_name total_epochs save_freq test_freq max_critic_ckpt_to_keep default_hdfs_dir "
        "group_name logger nnodes n_gpus_per_node default_local_dir sync_freq log_val_generations "
        "val_generations_to_log_to_wandb rollout_data_dir validation_data_dir"
    ),
    **silent("esi_redundant_time ray_wait_register_center_timeout use_v1 v1 training_rollout_mode enable_exp_buffer"),
}

KEYS: Mapping[type[Any], Keys] = {
    VerlConfig: _ROOT,
    schema.VerlActorRolloutRef: _ACTOR_ROLLOUT_REF,
    schema.VerlModel: _MODEL,
    schema.VerlCriticModel: _CRITIC_MODEL,
    schema.VerlFsdp: _FSDP,
    schema.VerlActorOptim: _ACTOR_OPTIM,
    schema.VerlCriticOptim: _OPTIM | unset("warmup_style"),
    schema.VerlCheckpoint: {
        **_HYDRA,
        **noted("load_contents", ["model", "optimizer", "extra"]),
        **noted("async_save", False),
        **silent("strict mbridge_config"),
    },
    schema.VerlActor: _ACTOR,
    schema.VerlRef: _REF,
    schema.VerlCritic: _CRITIC,
    schema.VerlTrainer: _TRAINER,
}
