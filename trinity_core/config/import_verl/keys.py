"""veRL's keys with one counterpart that `trainer.trainer_config` does not cover, and veRL's defaults that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trinity_core.config.engine_args import LOSSY, SAFE
from trinity_core.config.foreign.actions import Keys, Moved, Refusal

ROLLOUT, ENGINE, ACTOR = "actor_rollout_ref.rollout", "explorer.rollout_model", "actor_rollout_ref.actor"
MODEL, OPTIM, CORRECTION = "actor_rollout_ref.model", f"{ACTOR}.optim", "algorithm.rollout_correction"
OVERLONG, VALIDATION = "reward_model.reward_kwargs.overlong_buffer_cfg", f"{ROLLOUT}.val_kwargs"


def _file_name(value: Any, _: Any) -> str:
    """Return a name that can be part of a path."""
    return value.replace("/", "_") if isinstance(value, str) and not value.startswith("${") else str(value)


def _least(smallest: int, replacement: int) -> Callable[[Any, Any], Any]:
    """Return a conversion of veRL's -1, and other numbers below `smallest`, which mean "off"."""
    return lambda value, _: replacement if isinstance(value, int) and value < smallest else value


def _engine_argument(name: str) -> Moved:
    """Return the action for an argument of vLLM, whose value may be one that engines here do not have."""
    known = LOSSY.get(name)
    refusal = Refusal(f"extra_engine_args.{name} knows {', '.join(known or ())}")
    convert = (lambda value, _: value if value in known else refusal) if known else None
    return Moved((f"/{ENGINE}.extra_engine_args.{name}",), convert=convert)


def _moved(keys: Mapping[str, str], convert: Callable[[Any, Any], Any] | None = None) -> Keys:
    return {key: Moved((f"/{native}",), convert=convert) for key, native in keys.items()}


_RUN = {
    **_moved({"trainer.project_name": "project", "trainer.experiment_name": "name"}, _file_name),
    **_moved({"trainer.save_freq": "trainer.save_interval", "trainer.test_freq": "explorer.eval_interval"},
             _least(0, 0)),
    **_moved({"trainer.total_epochs": "buffer.total_epochs", f"{OPTIM}.clip_grad": "trainer.grad_clip"}),
}  # fmt: skip
_ENGINE = ("gpu_memory_utilization", "dtype", "enforce_eager", "max_num_seqs", "enable_prefix_caching", "seed")
COUNTERPARTS: Mapping[bool, Keys] = {
    False: {
        **_RUN,
        **_moved({
            "data.max_prompt_length": "model.max_prompt_tokens",
            "data.max_response_length": "model.max_response_tokens",
            "data.apply_chat_template_kwargs.enable_thinking": "model.enable_thinking",
            **{f"{ROLLOUT}.{name}": f"model.{name}" for name in ("temperature", "top_p")},
            **{f"{ROLLOUT}.{name}": f"{ENGINE}.{name}" for name in _ENGINE},
        }),
        **_moved({f"{ROLLOUT}.top_k": "model.top_k"}, _least(1, -1)),
        **{f"{ROLLOUT}.{name}": _engine_argument(name) for name in SAFE},
    },
    True: {
        **_RUN,
        **_moved({
            "data.max_length": "model.max_model_len",
            "data.train_batch_size": "buffer.train_batch_size",
            "trainer.seed": "seed",
        }),
    },
}  # fmt: skip
"""Keys that `trainer.trainer_config` ignores. False: of reinforcement learning; True: of supervised fine-tuning."""

RENAMED: Mapping[bool, Mapping[str, str]] = {
    False: {
        "reward.reward_manager": "reward_model.reward_manager",
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.reward_model.enable": "reward_model.enable",
        "reward.reward_model.model_path": "reward_model.model.path",
        "reward.reward_kwargs.": "reward_model.reward_kwargs.",
        "reward.custom_reward_function.": "custom_reward_function.",
        "reward_model.overlong_buffer.": f"{OVERLONG}.",
        "custom_reward_function.overlong_buffer.": f"{OVERLONG}.",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": f"{ACTOR}.ulysses_sequence_parallel_size",
        "algorithm.rollout_is_level": f"{CORRECTION}.rollout_is",
        "algorithm.rollout_is_threshold": f"{CORRECTION}.rollout_is_threshold",
        f"{CORRECTION}.bypass_old_logprob_for_rollout": f"{CORRECTION}.bypass_mode",
    },
    True: {
        "model.partial_pretrain": f"{MODEL}.path",
        "model.": f"{MODEL}.",
        "optim.warmup_steps_ratio": f"{OPTIM}.lr_warmup_steps_ratio",
        "optim.lr_scheduler": f"{OPTIM}.warmup_style",
        "optim.lr_decay_style": f"{OPTIM}.warmup_style",
        "optim.": f"{OPTIM}.",
        "data.use_dynamic_bsz": f"{ACTOR}.use_dynamic_bsz",
        "data.max_token_len_per_gpu": f"{ACTOR}.ppo_max_token_len_per_gpu",
        "data.micro_batch_size_per_gpu": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "data.micro_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    },
}
"""Other names of veRL's keys, or sections (with a dot at the end), in other releases and in supervised training."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "": {
        "trainer.project_name": "verl_examples",
        "trainer.experiment_name": "gsm8k",
        f"{MODEL}.path": "${oc.env:HOME}/models/deepseek-llm-7b-chat",
        f"{MODEL}.enable_gradient_checkpointing": True,
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
        f"{MODEL}.path": "${oc.env:HOME}/models/gemma-1.1-7b-it",
        f"{MODEL}.enable_gradient_checkpointing": True,
        "data.max_length": 1024,
        "data.train_batch_size": 256,
        "trainer.seed": 1,
        "trainer.total_epochs": 4,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    },
    "fsdp_sft_trainer": {
        f"{OPTIM}.lr": 1e-5,
        f"{OPTIM}.betas": [0.9, 0.95],
        f"{OPTIM}.lr_warmup_steps_ratio": 0.1,
        f"{OPTIM}.warmup_style": "cosine",
    },
    "sft_trainer": {
        f"{OPTIM}.lr": 1e-3,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192,
    },
}
"""veRL's defaults that differ from ours: for reinforcement learning, for supervised fine-tuning, and for each of its
two programs."""
