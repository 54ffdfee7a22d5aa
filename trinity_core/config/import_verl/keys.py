"""veRL's keys with one counterpart that `trainer.trainer_config` does not cover, and veRL's defaults that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ROLLOUT, ENGINE, ACTOR = "actor_rollout_ref.rollout", "explorer.rollout_model", "actor_rollout_ref.actor"
_RUN = {
    "trainer.project_name": "project",
    "trainer.experiment_name": "name",
    "trainer.total_epochs": "buffer.total_epochs",
    "trainer.save_freq": "trainer.save_interval",
    "trainer.test_freq": "explorer.eval_interval",
    f"{ACTOR}.optim.clip_grad": "trainer.grad_clip",
}
_ENGINE = ("gpu_memory_utilization", "dtype", "enforce_eager", "max_num_seqs", "enable_prefix_caching", "seed")
_OPTIMIZER = "algorithm.optimizer"
COUNTERPARTS: Mapping[bool, Mapping[str, str]] = {
    False: {
        **_RUN,
        "data.max_prompt_length": "model.max_prompt_tokens",
        "data.max_response_length": "model.max_response_tokens",
        "data.apply_chat_template_kwargs.enable_thinking": "model.enable_thinking",
        **{f"{ROLLOUT}.{name}": f"model.{name}" for name in ("temperature", "top_p", "top_k")},
        **{f"{ROLLOUT}.{name}": f"{ENGINE}.{name}" for name in _ENGINE},
    },
    True: {
        **_RUN,
        "model.path": "model.model_path",
        "model.partial_pretrain": "model.model_path",
        "model.trust_remote_code": "model.trust_remote_code",
        "model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
        "data.max_length": "model.max_model_len",
        "data.train_batch_size": "buffer.train_batch_size",
        "data.use_dynamic_bsz": "trainer.use_dynamic_bsz",
        "data.max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
        **{f"optim.{name}": f"{_OPTIMIZER}.{name}" for name in ("lr", "betas", "weight_decay", "min_lr_ratio")},
        **{f"optim.{name}": f"{_OPTIMIZER}.lr_warmup_steps_ratio"
           for name in ("warmup_steps_ratio", "lr_warmup_steps_ratio")},
        "optim.lr_warmup_steps": f"{_OPTIMIZER}.lr_warmup_steps",
        **{f"optim.{name}": f"{_OPTIMIZER}.warmup_style"
           for name in ("lr_scheduler", "lr_decay_style", "warmup_style", "lr_scheduler_type")},
        "optim.clip_grad": "trainer.grad_clip",
        "trainer.seed": "seed",
        "trainer.max_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    },
}  # fmt: skip
"""False: of reinforcement learning; True: of supervised fine-tuning."""


def _file_name(value: Any) -> str:
    """Return a name that can be part of a path."""
    return value.replace("/", "_") if isinstance(value, str) and not value.startswith("${") else str(value)


def _least(smallest: int, replacement: int) -> Callable[[Any], Any]:
    """Return a conversion of veRL's -1, and other numbers below `smallest`, which mean "off"."""
    return lambda value: replacement if isinstance(value, int) and value < smallest else value


CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "project": _file_name,
    "name": _file_name,
    "trainer.save_interval": _least(0, 0),
    "explorer.eval_interval": _least(0, 0),
    f"{_OPTIMIZER}.lr_warmup_steps": _least(0, 0),
    "model.top_k": _least(1, -1),
}

RENAMED: Mapping[str, str] = {
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.custom_reward_function.": "custom_reward_function.",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
}
"""veRL's keys of 2026, or sections with a dot at the end, and where the same settings were before."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "trainer.project_name": "verl_examples",
        "trainer.experiment_name": "gsm8k",
        "actor_rollout_ref.model.path": "${oc.env:HOME}/models/deepseek-llm-7b-chat",
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{ROLLOUT}.gpu_memory_utilization": 0.5,
        "trainer.total_epochs": 30,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    },
    "sft": {
        "trainer.project_name": "gsm8k-sft",
        "trainer.experiment_name": "test",
        "model.path": "${oc.env:HOME}/models/gemma-1.1-7b-it",
        "model.enable_gradient_checkpointing": True,
        "data.max_length": 1024,
        "data.train_batch_size": 256,
        "trainer.seed": 1,
        "trainer.total_epochs": 4,
        "trainer.save_freq": -1,
    },
    "fsdp_sft_trainer": {
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.warmup_steps_ratio": 0.1,
        "optim.lr_scheduler": "cosine",
    },
    "sft_trainer": {"optim.lr": 1e-3, "data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 8192},
}
"""veRL's defaults that differ from ours: for reinforcement learning, for supervised fine-tuning, and for each of its
two programs."""
