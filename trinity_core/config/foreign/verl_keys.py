"""veRL's training keys: what `trainer.trainer_config` may contain besides the settings of `schema/verl.py`.

A key that stands neither there nor here is accepted without effect: veRL has hundreds, and gets more with each release.
`import_verl/keys.py` has the counterparts of the rest of a veRL run, which only `import-verl` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_core.config.fields import sections
from trinity_core.config.foreign.actions import (
    Below,
    Dropped,
    Keys,
    Moved,
    Refusal,
    Rewritten,
    moved,
    noted,
    refused,
    silent,
    switched,
    unset,
)
from trinity_core.config.foreign.run_keys import OPTIMIZER, OPTIMIZER_NAMES, correction, strategy
from trinity_core.config.schema import VerlConfig
from trinity_core.config.schema import verl as schema

SECTIONS = frozenset(cls for _, cls in sections(VerlConfig))
"""Sections whose unknown keys have no effect."""
_OF_OPTIMIZER = "/algorithm.optimizer.*"
_BACKEND: Keys = {
    **silent("_target_ load_weight"),
    "strategy": Rewritten(strategy),
    **switched("qat"),
    **switched("router_replay", "disabled", by="mode"),
    **noted("use_torch_compile pad_to_length pad_to_length_bucket use_remove_padding", True),
    **noted("entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing", True, False),
}
"""Keys of an actor, a critic or a reference model, and of their `fsdp_config`."""


def _adapter(rank: Any, model: Mapping[str, Any]) -> list[dict[str, Any]]:
    targets, alpha = model.get("target_modules") or "all-linear", model.get("lora_alpha", 16)
    optional = {"path": model.get("lora_adapter_path"), "exclude_modules": model.get("exclude_modules")}
    adapter = {"lora_rank": rank, "lora_alpha": alpha, "target_modules": targets}
    return [adapter | {name: value for name, value in optional.items() if value}]


def _saved_adapter(path: Any, model: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the entry of an adapter whose rank veRL reads in its folder; None if `lora_rank` has made one."""
    return None if model.get("lora_rank") else [{"path": path}]


def _steps(steps: Any, _: Mapping[str, Any]) -> Any:
    """Return None for veRL's negative number of warm-up steps, which means "not given"."""
    return None if isinstance(steps, int | float) and steps < 0 else steps


def _resumes(mode: Any, _: Mapping[str, Any]) -> Any:
    return {"auto": None, "disable": False}.get(mode, Refusal()) if isinstance(mode, str) else Refusal()


_ANY_MODEL: Keys = {
    **silent("_target_"),
    **noted("use_remove_padding", True),
    **switched("tiled_mlp", by="enabled"),
    **switched("mtp"),
    **switched("lora", by="rank"),
    **refused("enable_activation_offload"),
}
_OPTIM: Keys = {
    **OPTIMIZER,
    **refused("optimizer", *OPTIMIZER_NAMES),
    **refused("override_optimizer_config"),
    **refused("num_cycles", 0.5),
    **noted("optimizer_impl lr_decay_style weight_decay_incr_style", "torch.optim", "constant"),
    **silent("_target_ zero_indexed_step use_checkpoint_opt_param_scheduler lr_wsd_decay_style"),
}
KEYS: Mapping[type[Any], Keys] = {
    VerlConfig: {
        **silent("_target_ sandbox_fusion synchronizer"),
        "algorithm": Below({"rollout_correction": Rewritten(correction)}, Dropped()),
        "reward": Below(switched("reward_model"), Dropped()),
        **switched("reward_model transfer_queue"),
        **switched("custom_reward_function", by="path"),
        **switched("distillation", by="enabled"),
    },
    schema.VerlActorRolloutRef: silent("_target_ synchronizer explorer_name") | noted("hybrid_engine", True),
    schema.VerlModel: {
        **_ANY_MODEL,
        **moved("enable_gradient_checkpointing", "/trainer.gradient_checkpointing", yields=True),
        **moved("trust_remote_code custom_chat_template", "/model.*", yields=True),
        **moved("path", "/model.model_path", unset=("",), yields=True),
        **moved("lora_rank", "/model.lora_configs", unset=(0,), convert=_adapter, yields=True),
        **moved("lora_adapter_path", "/model.lora_configs", unset=("",), convert=_saved_adapter, yields=True),
        **silent("lora_alpha target_modules exclude_modules"),  # parts of lora_rank's entry
    },
    schema.VerlCriticModel: {
        **_ANY_MODEL,
        **moved("path", "/model.critic_model_path", yields=True),
        **refused("lora_rank lora_adapter_path"),
        **silent("custom_chat_template lora_alpha target_modules exclude_modules"),
    },
    schema.VerlFsdp: _BACKEND | silent("seed full_determinism forward_only ulysses_sequence_parallel_size"),
    schema.VerlActorOptim: {
        **_OPTIM,
        **moved("lr weight_decay betas lr_warmup_steps_ratio min_lr_ratio warmup_style", _OF_OPTIMIZER, yields=True),
        **moved("lr_warmup_steps", _OF_OPTIMIZER, convert=_steps, yields=True),
    },
    schema.VerlCriticOptim: _OPTIM,
    schema.VerlCheckpoint: {
        **silent("_target_ strict mbridge_config"),
        **noted("load_contents", ["model", "optimizer", "extra"]),
    },
    schema.VerlActor: {
        **_BACKEND,
        **moved("use_dynamic_bsz grad_clip ulysses_sequence_parallel_size", "/trainer.*", yields=True),
        **moved("ppo_max_token_len_per_gpu", "/trainer.max_token_len_per_gpu", yields=True),
        **refused("freeze_vision_tower"),
        **noted("fix_actor_microbatch_loss_scale", True, False),
    },
    schema.VerlRef: _BACKEND,
    schema.VerlCritic: {
        **_BACKEND,
        **unset("ppo_epochs", 0),
        **unset("cliprange_value", 0.0, 0),
        **moved("fsdp", "model.fsdp_config", yields=True),
    },
    schema.VerlTrainer: {
        **moved("max_actor_ckpt_to_keep", "/trainer.max_checkpoints_to_keep", yields=True),
        **moved("total_training_steps", "/buffer.total_steps", yields=True),
        **moved("val_before_train", "/explorer.eval_on_startup", yields=True),
        "resume_mode": Moved(("/continue_from_checkpoint",), convert=_resumes, yields=True),
        **refused("resume_from_path val_only"),
        **noted("balance_batch device", True, "cuda"),
        **silent("_target_ esi_redundant_time ray_wait_register_center_timeout use_v1 v1 training_rollout_mode"),
        **silent("enable_exp_buffer"),
    },
}
