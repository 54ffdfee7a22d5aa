"""veRL's training keys: what `trainer.trainer_config` may contain besides the settings of `schema/verl.py`.

`import_verl/run_keys.py` covers the rest of a veRL run, which only `import-verl` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trinity_core.config.foreign.key_action import (
    FOLLOWS,
    SILENT,
    Below,
    Cases,
    Imported,
    Keys,
    Noted,
    Rewritten,
    keys,
    moved,
    noted,
    refused,
    same,
    unset,
)
from trinity_core.config.foreign.run_keys import (
    ADAMW,
    EXACT,
    NOT_MEGATRON,
    ROPE,
    SCHEDULE,
    STRATEGY,
    betas,
    correction,
)
from trinity_core.config.schema import VerlConfig
from trinity_core.config.schema import verl as schema

SECTIONS = "The run's own sections say this: algorithm, buffer, cluster, explorer, trainer, project and name."
SAID = noted(SECTIONS)
SHARDED = noted("DeepSpeed shards the model; see trainer.zero_stage.", -1, False, 0, {"min_num_params": 0})
DTYPE = noted("See trainer.dtype.")
PADDING = noted("Micro-batches never hold more padding than their rows' difference in length.", True)
ENTROPY = noted("Entropy is always computed in chunks, and recomputed in the backward pass.", False, True)
FUSED = noted("Log-probs are always computed in chunks, without full logits.", False, {})
BY_ROWS = noted("Replaced by the number of rows for each GPU.")
AS_ACTOR = noted("Follows the actor's.")
IN_UPDATE = noted("Values are computed in the micro-batches of the update.")
PROFILED = noted("Work is not profiled; monitor.enable_ray_timeline records a timeline of the run.", {}, "")
RESUMED = "use continue_from_checkpoint: true resumes from the run's latest checkpoint, false starts over."
SHUFFLED = noted("Each update takes the whole batch, in which the order of rows does not matter.", False)
COMPILED = noted("See trainer.torch_compile.")
VISION = refused("models see text alone: there are no images or videos.", False)
QUANTIZED = Below({"enable": refused("weights are not quantized in training.", False)}, SILENT)
REPLAYED = Below({"mode": refused("the experts' choice is not replayed in training.", "disabled")}, SILENT)
CRITIC_LORA = Noted("All weights of the critic are trained: it has no adapter.", asked_by="lora_rank")
HYDRA: Keys = {"_target_": SILENT}


def imported(to: str, convert: Callable[[Any], Any] | None = None) -> Imported:
    """A key that another section of the run covers; `import-verl` writes it there."""
    return Imported(SECTIONS, to=to, convert=convert)


def _adapter(rank: Any, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    targets = model.get("target_modules") or "all-linear"
    path, alpha = model.get("lora_adapter_path"), model.get("lora_alpha", 16)
    return [{"path": path, "lora_rank": rank, "lora_alpha": alpha, "target_modules": targets}]


def file_name(value: Any) -> Any:
    """Return a name that can be part of a path."""
    return value.replace("/", "_") if isinstance(value, str) and not value.startswith("${") else str(value)


def steps_or_none(value: Any) -> Any:
    """Convert veRL's -1 (off) to 0."""
    return 0 if isinstance(value, int) and value < 0 else value


def _enabled(why: str, name: str = "enable") -> Below:
    """A section that must not be enabled."""
    return Below({name: refused(why, False)}, SILENT)


def _steps(steps: Any, _: Mapping[str, Any]) -> Any:
    """Return None for veRL's negative number of warm-up steps, which means "not given"."""
    return None if isinstance(steps, int | float) and steps < 0 else steps


ROOT = keys(
    HYDRA,
    {
        "algorithm": Below({"rollout_correction": Rewritten(correction)}, SAID),
        "data": SAID,
        "reward_model": _enabled("a reward model is one of explorer.auxiliary_models, which math_rm_workflow asks."),
        "reward": Below(
            {
                "reward_model": _enabled(
                    "a reward model is one of explorer.auxiliary_models, which math_rm_workflow asks."
                )
            },
            noted("Rewards are set up under buffer.explorer_input.default_reward_fn_type."),
        ),
        "custom_reward_function": Below(
            {"path": refused("put the function into a file of plugin_dir, and name it as default_reward_fn_type.")},
            SILENT,
        ),
        "distillation": _enabled("set algorithm.algorithm_type to on_policy_distill.", "enabled"),
        "transfer_queue": _enabled("experiences go through the run's store."),
        "skip": noted("Rollouts are not replayed from files; see buffer.trainer_input.experience_buffer."),
        "enable_preview": noted("Rollouts are always recorded."),
    },
    same(PROFILED, "global_profiler ray_kwargs"),
    same(SILENT, "sandbox_fusion synchronizer"),
)
ACTOR_ROLLOUT_REF = keys(
    HYDRA,
    {
        "rollout": noted("Rollouts are set up under explorer."),
        "hybrid_engine": noted("Engines and trainer are always separate processes.", True),
        "nccl_timeout": noted("See synchronizer.sync_timeout."),
    },
    same(SILENT, "synchronizer explorer_name"),
)
ANY_MODEL = keys(
    HYDRA,
    {
        "use_remove_padding": PADDING,
        **same(FUSED, "use_fused_kernels fused_kernel_options use_liger"),
        "tiled_mlp": _enabled("see gradient_checkpointing, which saves more.", "enabled"),
        "external_lib": noted("A module of plugin_dir is imported, no other."),
        "enable_activation_offload": refused(
            "activations are not offloaded; see enable_gradient_checkpointing.", False
        ),
        "use_shm": noted("Models are read from their folders.", False),
        "mtp": _enabled("models predict one token at a time."),
        "rope_scaling": ROPE,
        "rope_theta": ROPE,
    },
    same(noted("It is the model's own."), "tokenizer_path hf_config_path"),
)
MODEL = keys(
    ANY_MODEL,
    {
        "enable_gradient_checkpointing": moved("/trainer.gradient_checkpointing", yields=True),
        "trust_remote_code": moved("/model.trust_remote_code", yields=True),
        "path": moved("/model.model_path", unset=("",), yields=True),
        "custom_chat_template": moved("/model.custom_chat_template", yields=True),
        "lora_rank": moved("/model.lora_configs", unset=(0,), convert=_adapter, yields=True),
        "lora": Below({"rank": refused("write model.lora_configs.", 0)}, SILENT),
        "exclude_modules": refused("name the target_modules of model.lora_configs instead."),
    },
    same(SILENT, "lora_alpha target_modules lora_adapter_path"),  # parts of lora_rank's entry
)
CRITIC_MODEL = keys(
    ANY_MODEL,
    {
        "path": moved("/model.critic_model_path", yields=True),
        "trust_remote_code": AS_ACTOR,
        "custom_chat_template": SILENT,
        "lora_rank": refused("all weights of the critic are trained: it has no adapter.", 0),
        "lora": Below({"rank": refused("all weights of the critic are trained: it has no adapter.", 0)}, SILENT),
    },
    same(CRITIC_LORA, "lora_alpha target_modules exclude_modules lora_adapter_path"),
)
FSDP = keys(
    HYDRA,
    {
        "use_torch_compile": COMPILED,
        "strategy": STRATEGY,
        "qat": QUANTIZED,
    },
    same(
        SHARDED,
        "wrap_policy fsdp_size forward_prefetch offload_policy reshard_after_forward use_orig_params min_num_params",
    ),
    same(DTYPE, "model_dtype dtype mixed_precision"),
    same(
        SILENT,
        "seed full_determinism forward_only ulysses_sequence_parallel_size",
    ),
    same(
        ENTROPY,
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
    ),
    same(PADDING, "pad_to_length pad_to_length_bucket"),
)
OPTIM = keys(
    HYDRA,
    {
        "lr_scheduler_type": moved("warmup_style"),
        "optimizer": ADAMW,
        "optimizer_impl": noted("AdamW is PyTorch's.", "torch.optim"),
        "override_optimizer_config": refused("AdamW has lr, weight_decay and betas, and algorithm.optimizer.eps.", {}),
        "total_training_steps": noted("It follows from buffer.", -1),
        "num_cycles": refused("a cosine goes down once, from lr to min_lr_ratio.", 0.5),
        "beta1": Rewritten(betas),
        "beta2": Rewritten(betas),
    },
    same(
        SILENT,
        "zero_indexed_step use_checkpoint_opt_param_scheduler lr_wsd_decay_style",
    ),
    same(
        SCHEDULE,
        "lr_warmup_init lr_decay_steps lr_decay_style min_lr weight_decay_incr_style lr_wsd_decay_steps",
    ),
)
ACTOR_OPTIM = keys(
    OPTIM,
    {
        "clip_grad": Imported("See grad_clip.", to="trainer.grad_clip"),
        **same(
            moved("/algorithm.optimizer.*", yields=True),
            "lr weight_decay betas lr_warmup_steps_ratio min_lr_ratio warmup_style",
        ),
        "lr_warmup_steps": moved("/algorithm.optimizer.lr_warmup_steps", convert=_steps, yields=True),
    },
)
CRITIC_OPTIM = keys(OPTIM, {"clip_grad": noted("See grad_clip."), "warmup_style": unset()})
CHECKPOINT = keys(
    HYDRA,
    {
        "load_contents": noted("A checkpoint is always loaded whole.", ["model", "optimizer", "extra"]),
        "async_save": noted("A checkpoint is whole before training continues.", False),
    },
    same(SILENT, "strict mbridge_config"),
)
WORKER = keys(
    HYDRA,
    {
        "strategy": STRATEGY,
        "megatron": NOT_MEGATRON,
        **same(SAID, "rollout_n loss_scale_factor loss_agg_mode"),
        "data_loader_seed": SHUFFLED,
        "load_weight": SILENT,
        "use_torch_compile": COMPILED,
        "router_replay": REPLAYED,
        "qat": QUANTIZED,
    },
    same(PROFILED, "profiler profile"),
    same(PADDING, "pad_to_length use_remove_padding"),
    same(
        ENTROPY,
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing",
    ),
)
ACTOR = keys(
    WORKER,
    {
        "use_dynamic_bsz": moved("/trainer.use_dynamic_bsz", yields=True),
        "ppo_max_token_len_per_gpu": moved("/trainer.max_token_len_per_gpu", yields=True),
        "grad_clip": moved("/trainer.grad_clip", yields=True),
        "ulysses_sequence_parallel_size": moved("/trainer.ulysses_sequence_parallel_size", yields=True),
        "ppo_micro_batch_size": BY_ROWS,
        "ppo_mini_batch_size": noted("It follows from buffer.train_batch_size."),
        "shuffle": SHUFFLED,
        "fix_actor_microbatch_loss_scale": EXACT,
        "freeze_vision_tower": VISION,
        "use_fused_kernels": FUSED,
    },
    same(
        SAID,
        "clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg policy_loss "
        "entropy_coeff calculate_entropy calculate_sum_pi_squared use_kl_loss kl_loss_coef "
        "kl_loss_type use_prefix_grouper alg_type tau opmd_baseline use_uid",
    ),
)
REF = keys(
    WORKER,
    {
        "log_prob_micro_batch_size": BY_ROWS,
        "log_prob_use_dynamic_bsz": AS_ACTOR,
        "ulysses_sequence_parallel_size": AS_ACTOR,
        "checkpoint": noted("The reference model is never saved."),
    },
)
CRITIC = keys(
    WORKER,
    {
        "enable": noted("There is a critic where the advantage function reads values."),
        "ppo_micro_batch_size": BY_ROWS,
        "ppo_mini_batch_size": noted("It follows from buffer.train_batch_size."),
        "ppo_epochs": unset(0),
        "cliprange_value": unset(0.0, 0),
        "shuffle": SHUFFLED,
        "fsdp": moved("model.fsdp_config", yields=True),
        "ulysses_sequence_parallel_size": AS_ACTOR,
        "checkpoint": noted("A critic's checkpoint is always whole."),
        "nccl_timeout": noted("See synchronizer.sync_timeout."),
        "ray_namespace": FOLLOWS,
    },
    same(
        IN_UPDATE,
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
    ),
)
TRAINER = keys(
    HYDRA,
    {
        "max_actor_ckpt_to_keep": moved("/trainer.max_checkpoints_to_keep", yields=True),
        "total_training_steps": moved("/buffer.total_steps", yields=True),
        "project_name": imported("project", file_name),
        "experiment_name": imported("name", file_name),
        "total_epochs": imported("buffer.total_epochs"),
        "save_freq": imported("trainer.save_interval", steps_or_none),
        "test_freq": imported("explorer.eval_interval", steps_or_none),
        "balance_batch": noted("Workers always get rows of about equal total length.", True),
        "max_critic_ckpt_to_keep": noted("Actor and critic are kept together."),
        "resume_mode": Cases(
            {"auto": SILENT, "disable": moved("/continue_from_checkpoint", convert=lambda *_: False, yields=True)},
            refused(RESUMED),
        ),
        "resume_from_path": refused(RESUMED, ""),
        "val_before_train": moved("/explorer.eval_on_startup", yields=True),
        "val_only": refused("set mode to bench.", False),
        "remove_previous_ckpt_in_save": noted("See max_actor_ckpt_to_keep.", False),
        "del_local_ckpt_after_load": noted("Checkpoints are never removed on loading.", False),
        "default_hdfs_dir": noted("Checkpoints go to checkpoint_root_dir."),
        "device": noted("See cluster.gpu_per_node.", "cuda"),
    },
    same(
        SAID,
        "group_name logger nnodes n_gpus_per_node default_local_dir sync_freq",
    ),
    same(
        noted("Rollouts and evaluations are always recorded in the run's folder."),
        "log_val_generations val_generations_to_log_to_wandb rollout_data_dir validation_data_dir",
    ),
    same(
        SILENT,
        "esi_redundant_time ray_wait_register_center_timeout use_v1 v1 training_rollout_mode enable_exp_buffer",
    ),
)

KEYS: Mapping[type[Any], Keys] = {
    VerlConfig: ROOT,
    schema.VerlActorRolloutRef: ACTOR_ROLLOUT_REF,
    schema.VerlModel: MODEL,
    schema.VerlCriticModel: CRITIC_MODEL,
    schema.VerlFsdp: FSDP,
    schema.VerlActorOptim: ACTOR_OPTIM,
    schema.VerlCriticOptim: CRITIC_OPTIM,
    schema.VerlCheckpoint: CHECKPOINT,
    schema.VerlActor: ACTOR,
    schema.VerlRef: REF,
    schema.VerlCritic: CRITIC,
    schema.VerlTrainer: TRAINER,
}
