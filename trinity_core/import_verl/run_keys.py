"""veRL's keys of a whole run; those about training are in `config/foreign/verl_keys.py`, which runs read too.

An `Imported` row names the key here. Keys that must be combined, such as batch sizes and losses, are handled in the
other files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_core.config.fields import Setting, sections, settings
from trinity_core.config.foreign.key_action import Below, Imported, KeyAction, Keys, Moved, Noted, keys, noted, same
from trinity_core.config.foreign.table import KEYS, ROOT
from trinity_core.config.foreign.verl_keys import PROFILED, imported, steps_or_none
from trinity_core.config.schema import VerlConfig

ROLLOUT, ENGINE = "actor_rollout_ref.rollout", "explorer.rollout_model"
TURNS = "A conversation of several turns is a workflow here (docs/workflows.md, docs/agents.md)."
SANDBOX = "A built-in sandbox runs code for code_reward (docs/rewards.md)."
REWARD = "Register a reward in a file of --plugin-dir, and name it as default_reward_fn_type (docs/rewards.md)."
TEXT_ONLY = noted("Text only: there are no images, videos or sound.")
READ_ONCE = noted("Rows are read once, when the run starts.")
FROM_ENGINE = noted("Log-probs of rollouts always come from the engine that sampled them.")
OVERLONG = Noted("See math_dapo_reward (docs/rewards.md).", asked_by="enable")


def top_k_or_all(value: Any) -> Any:
    """Convert 0 and less to -1 (all tokens)."""
    return -1 if isinstance(value, int) and value <= 0 else value


def within(section: str, below: Keys) -> Keys:
    """Return the keys of a section with dotted names."""
    return {f"{section}.{name}": action for name, action in below.items()}


REINFORCED: Keys = keys(
    within("data", keys(
        {
            "max_prompt_length": imported("model.max_prompt_tokens"),
            "max_response_length": imported("model.max_response_tokens"),
            "apply_chat_template_kwargs.enable_thinking": imported("model.enable_thinking"),
            "reward_fn_key": noted("A reward is chosen for a task set, by default_reward_fn_type."),
            "val_batch_size": noted("All tasks of an evaluation are given to the engines at once."),
            "validation_shuffle": noted("An evaluation goes through its tasks in order."),
            "gen_batch_size": noted("As many tasks as are missing are drawn by dynamic_sampling."),
            "custom_cls": noted("Columns are named by format; other data is made by a task pipeline (docs/data.md)."),
            "datagen": noted("Tasks are made by a task pipeline (docs/data.md)."),
            "sampler": noted("The order of tasks is a task_selector (docs/curricula.md)."),
            "tokenizer": noted("The tokenizer is the model's."),
            "balance_dp_token": noted("Workers always get rows of about equal total length."),
        },
        same(TEXT_ONLY, "image_key video_key audio_key image_patch_size return_multi_modal_inputs"),
        same(READ_ONCE, "dataloader_num_workers filter_overlong_prompts_workers"),
        same(noted("Rows keep all their columns."), "return_raw_input_ids return_raw_chat return_full_prompt"),
    )),
    within(ROLLOUT, keys(
        {
            "temperature": imported("model.temperature"),
            "top_p": imported("model.top_p"),
            "top_k": imported("model.top_k", top_k_or_all),
            "multi_turn": Noted(TURNS, asked_by="enable"),
            "agent": noted(TURNS),
            "agent.num_workers": noted("All rollouts of a step run at once (explorer.runner_per_model)."),
            "agent.default_agent_loop": noted(TURNS, "single_turn_agent"),
            "max_num_batched_tokens": noted("See explorer.rollout_model.extra_engine_args.", 8192),
            "prometheus": Noted("See monitor.prometheus_port.", asked_by="enable"),
            "trace": Noted("See monitor.traces_per_step.", asked_by="backend"),
            "disaggregation": Noted("Engines are set up under explorer.rollout_model.", asked_by="enabled"),
            "name": noted("The engine is vLLM."),
            "mode": noted("Rollouts are always asynchronous."),
            "do_sample": noted("Answers are sampled; temperature 0 is greedy."),
            "max_model_len": noted("Follows from max_prompt_tokens and max_response_tokens."),
            "prompt_length": noted("Follows from data.max_prompt_length."),
            "response_length": noted("Follows from data.max_response_length."),
            "layered_summon": Noted(
                "Engines load full weights by weight sync.", asked_by="actor_rollout_ref.model.lora_rank"
            ),
        },
        same(
            noted(TURNS, 1, 256),
            "multi_turn.max_assistant_turns multi_turn.max_user_turns multi_turn.max_parallel_calls "
            "multi_turn.max_tool_response_length",
        ),
        same(
            imported(f"{ENGINE}.*"),
            "gpu_memory_utilization dtype enforce_eager max_num_seqs enable_prefix_caching seed",
        ),
        same(
            FROM_ENGINE,
            "calculate_log_probs log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
            "log_prob_max_token_len_per_gpu",
        ),
    )),
    within("global_profiler", same(Noted(PROFILED.why, asked_by="tool"), "save_path global_tool_config")),
    {
        "reward_model.sandbox_fusion": Noted(SANDBOX, asked_by="url"),
        "reward_model.reward_kwargs": noted("Arguments of a reward are reward_fn_args."),
        **same(
            OVERLONG,
            "reward_model.reward_kwargs.overlong_buffer_cfg reward_model.overlong_buffer "
            "custom_reward_function.overlong_buffer",
        ),
        "reward.sandbox_fusion": Noted(SANDBOX, asked_by="url"),
        "reward.custom_reward_function": Noted(REWARD, asked_by="path"),
        "reward.reward_manager": Noted(REWARD, asked_by="module.path"),
        "algorithm.pf_ppo": Noted("Rows are not reweighted.", asked_by="algorithm.use_pf_ppo"),
        "algorithm.use_pf_ppo": noted("Rows are not reweighted; see replay_buffer for priorities."),
        "algorithm.filter_groups": Noted("See dynamic_sampling (docs/explorer.md).", asked_by="enable"),
        "ray_init": noted("The run starts its own Ray, or joins cluster.ray_address."),
    },
)  # fmt: skip

RENAMED: dict[str, str] = {
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.enable": "reward_model.enable",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.custom_reward_function.": "custom_reward_function.",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    ),
}
"""veRL's keys of 2026, or sections with a dot at the end, and where the same settings were before."""

SUPERVISED: Keys = keys(
    within("model", {
        "path": imported("model.model_path"),
        "partial_pretrain": imported("model.model_path"),
        "trust_remote_code": imported("model.trust_remote_code"),
        "enable_gradient_checkpointing": imported("trainer.gradient_checkpointing"),
        "lora_rank": noted("Write model.lora_configs.", 0),
        **same(Noted("Write model.lora_configs.", asked_by="lora_rank"), "lora_alpha target_modules exclude_modules"),
        "use_liger": noted("Kernels are those of transformers; see trainer.torch_compile."),
        "strategy": noted("DeepSpeed trains here: see trainer.zero_stage."),
        "fsdp_config": noted("DeepSpeed trains here: see trainer.zero_stage."),
    }),
    within("data", {
        "max_length": imported("model.max_model_len"),
        "train_batch_size": imported("buffer.train_batch_size"),
        "use_dynamic_bsz": imported("trainer.use_dynamic_bsz"),
        "max_token_len_per_gpu": imported("trainer.max_token_len_per_gpu"),
    }),
    within("optim", {
        **same(imported("algorithm.optimizer.*"), "lr betas weight_decay min_lr_ratio"),
        **same(imported("algorithm.optimizer.lr_warmup_steps_ratio"), "warmup_steps_ratio lr_warmup_steps_ratio"),
        "lr_warmup_steps": imported("algorithm.optimizer.lr_warmup_steps", steps_or_none),
        **same(
            imported("algorithm.optimizer.warmup_style"), "lr_scheduler lr_decay_style warmup_style lr_scheduler_type"
        ),
        "clip_grad": imported("trainer.grad_clip"),
    }),
    {
        "optim": noted("The optimizer is AdamW: see algorithm.optimizer."),
        "engine": noted("DeepSpeed trains here: see trainer.zero_stage."),
        "checkpoint": noted("A checkpoint is always whole."),
        "profiler": noted("Profiling: see monitor.enable_ray_timeline."),
        "ulysses_sequence_parallel_size": noted("Each sequence is one worker's."),
        "use_remove_padding": noted("Micro-batches hold hardly any padding: rows of like length go together."),
        "trainer.seed": imported("seed"),
        "trainer.max_ckpt_to_keep": imported("trainer.max_checkpoints_to_keep"),
    },
)  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
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


def verl_actions(supervised: bool) -> Keys:
    """Return the action for each key of a whole veRL run, by dotted key.

    `supervised` is True for supervised fine-tuning, some of whose keys differ.
    """
    own = {
        path: below
        for section, cls in sections(VerlConfig)
        for name, action in KEYS.get(cls, {}).items()
        for path, below in _with_inner(f"{section}.{name}".lstrip("."), action)
    }
    return keys(own, SUPERVISED if supervised else REINFORCED)


def _with_inner(key: str, action: KeyAction) -> Iterator[tuple[str, KeyAction]]:
    """Yield the key, and the keys below it that have their own actions."""
    yield key, action
    if isinstance(action, Below):
        for name, inner in action.keys.items():
            yield from _with_inner(f"{key}.{name}", inner)


@functools.cache
def verl_settings() -> Mapping[str, Setting]:
    """Return our settings that have a veRL key, by that key."""
    return {
        f"{section}.{setting.name}".lstrip("."): setting
        for section, cls in sections(VerlConfig)
        for setting in settings(cls)
        if setting.section is None
    }


def counterpart(actions: Mapping[str, KeyAction], key: str) -> tuple[str, KeyAction | None]:
    """Return our key for a key of a veRL run, and the action that leads to it; an empty key if there is none."""
    for prefix in prefixes(key):
        action, rest = actions.get(prefix), key[len(prefix) :]
        if isinstance(action, Imported) and not rest:
            return action.to, action
        if isinstance(action, Moved):
            to = f"{action.to[0]}{rest}"
            if to.startswith("/"):
                return to.removeprefix("/"), action
            return counterpart(actions, f"{prefix.rpartition('.')[0]}.{to}")
        if prefix in verl_settings():
            return f"{ROOT}.{key}", None
        if action is not None:
            break
    return "", None


def prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and the sections that contain it, innermost first."""
    while key:
        yield key
        key = key.rpartition(".")[0]
