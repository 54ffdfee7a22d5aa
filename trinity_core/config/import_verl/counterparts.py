"""The table: which veRL key is which key here, and which has no counterpart, with the reason.

Keys of veRL's actor, reference, critic and trainer that stand in neither table are those of `trainer.trainer_config`
(`schema/verl.py`); keys that decide several settings together are in `rl_run.py` and `sft_run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROLLOUT, ENGINE = "actor_rollout_ref.rollout", "explorer.rollout_model"


def _same(value: Any) -> Any:
    return value


def _folder(value: Any) -> Any:
    """A name that is part of a path here."""
    return value.replace("/", "_") if isinstance(value, str) and not value.startswith("${") else str(value)


def _steps(value: Any) -> Any:
    """veRL's -1 switches something off; here 0 does."""
    return 0 if isinstance(value, int) and value < 0 else value


def _top_k(value: Any) -> Any:
    """0 and less mean all tokens."""
    return -1 if isinstance(value, int) and value <= 0 else value


def _course(value: Any) -> Any:
    """The learning rate after the warm-up; None for a course that is not here."""
    return value if value in ("constant", "cosine", "linear") else None


def tracker(value: Any) -> str | None:
    """The first of veRL's loggers that is here; None if none is."""
    names = [str(each) for each in (value if isinstance(value, list) else [value])]
    here = {"wandb": "wandb", "vemlp_wandb": "wandb", "mlflow": "mlflow", "tensorboard": "tensorboard"}
    return next((here[name] for name in names if name in here), None)


@dataclass(frozen=True)
class Counterpart:
    """A veRL key that one key here stands for."""

    verl: str
    native: str
    default: Any = None
    """veRL's own default, written where it is not the default here; None where there is no need."""
    convert: Callable[[Any], Any] = _same
    """From veRL's value to ours."""
    counts_batches: bool = False
    """True for steps of `data.train_batch_size` tasks, each of which is `sync_interval` steps here."""


REINFORCED = (
    Counterpart("trainer.project_name", "project", "verl_examples", _folder),
    Counterpart("trainer.experiment_name", "name", "gsm8k", _folder),
    Counterpart("actor_rollout_ref.model.path", "model.model_path", "${oc.env:HOME}/models/deepseek-llm-7b-chat"),
    Counterpart("actor_rollout_ref.model.custom_chat_template", "model.custom_chat_template"),
    Counterpart("data.max_prompt_length", "model.max_prompt_tokens", 512),
    Counterpart("data.max_response_length", "model.max_response_tokens", 512),
    Counterpart("data.apply_chat_template_kwargs.enable_thinking", "model.enable_thinking"),
    Counterpart(f"{ROLLOUT}.temperature", "model.temperature"),
    Counterpart(f"{ROLLOUT}.top_p", "model.top_p"),
    Counterpart(f"{ROLLOUT}.top_k", "model.top_k", None, _top_k),
    Counterpart(f"{ROLLOUT}.gpu_memory_utilization", f"{ENGINE}.gpu_memory_utilization", 0.5),
    Counterpart(f"{ROLLOUT}.dtype", f"{ENGINE}.dtype"),
    Counterpart(f"{ROLLOUT}.enforce_eager", f"{ENGINE}.enforce_eager"),
    Counterpart(f"{ROLLOUT}.max_num_seqs", f"{ENGINE}.max_num_seqs"),
    Counterpart(f"{ROLLOUT}.enable_prefix_caching", f"{ENGINE}.enable_prefix_caching"),
    Counterpart(f"{ROLLOUT}.seed", f"{ENGINE}.seed"),
    Counterpart(
        "actor_rollout_ref.actor.optim.lr_warmup_steps", "algorithm.optimizer.lr_warmup_steps", None, _steps, True
    ),
    Counterpart("actor_rollout_ref.actor.optim.clip_grad", "trainer.grad_clip"),
    Counterpart("actor_rollout_ref.actor.optim.lr_scheduler_type", "algorithm.optimizer.warmup_style", None, _course),
    Counterpart("critic.optim.lr_scheduler_type", "trainer.trainer_config.critic.optim.warmup_style", None, _course),
    Counterpart("actor_rollout_ref.model.enable_gradient_checkpointing", "trainer.gradient_checkpointing", True),
    Counterpart("trainer.total_epochs", "buffer.total_epochs", 30),
    Counterpart("trainer.total_training_steps", "buffer.total_steps", counts_batches=True),
    Counterpart("trainer.critic_warmup", "trainer.trainer_config.trainer.critic_warmup", counts_batches=True),
    Counterpart("trainer.save_freq", "trainer.save_interval", -1, _steps),
    Counterpart("trainer.test_freq", "explorer.eval_interval", -1, _steps),
    Counterpart("trainer.val_before_train", "explorer.eval_on_startup"),
)
"""Reinforcement learning (main_ppo, main_dapo)."""

SUPERVISED = (
    Counterpart("trainer.project_name", "project", "gsm8k-sft", _folder),
    Counterpart("trainer.experiment_name", "name", "test", _folder),
    Counterpart("model.path", "model.model_path", "${oc.env:HOME}/models/gemma-1.1-7b-it"),
    Counterpart("model.partial_pretrain", "model.model_path"),
    Counterpart("model.trust_remote_code", "model.trust_remote_code"),
    Counterpart("model.enable_gradient_checkpointing", "trainer.gradient_checkpointing", True),
    Counterpart("data.max_length", "model.max_model_len", 1024),
    Counterpart("data.train_batch_size", "buffer.train_batch_size", 256),
    Counterpart("data.use_dynamic_bsz", "trainer.use_dynamic_bsz"),
    Counterpart("data.max_token_len_per_gpu", "trainer.max_token_len_per_gpu"),
    Counterpart("optim.lr", "algorithm.optimizer.lr"),
    Counterpart("optim.betas", "algorithm.optimizer.betas"),
    Counterpart("optim.weight_decay", "algorithm.optimizer.weight_decay"),
    Counterpart("optim.warmup_steps_ratio", "algorithm.optimizer.lr_warmup_steps_ratio"),
    Counterpart("optim.lr_warmup_steps_ratio", "algorithm.optimizer.lr_warmup_steps_ratio"),
    Counterpart("optim.lr_warmup_steps", "algorithm.optimizer.lr_warmup_steps", None, _steps),
    Counterpart("optim.lr_scheduler", "algorithm.optimizer.warmup_style", None, _course),
    Counterpart("optim.lr_decay_style", "algorithm.optimizer.warmup_style", None, _course),
    Counterpart("optim.warmup_style", "algorithm.optimizer.warmup_style", None, _course),
    Counterpart("optim.lr_scheduler_type", "algorithm.optimizer.warmup_style", None, _course),
    Counterpart("optim.min_lr_ratio", "algorithm.optimizer.min_lr_ratio"),
    Counterpart("optim.clip_grad", "trainer.grad_clip"),
    Counterpart("trainer.seed", "seed", 1),
    Counterpart("trainer.total_epochs", "buffer.total_epochs", 4),
    Counterpart("trainer.total_training_steps", "buffer.total_steps"),
    Counterpart("trainer.save_freq", "trainer.save_interval", -1, _steps),
    Counterpart("trainer.max_ckpt_to_keep", "trainer.max_checkpoints_to_keep"),
)
"""Supervised fine-tuning (fsdp_sft_trainer, sft_trainer)."""

SFT_DEFAULTS: dict[str, dict[str, Any]] = {
    "fsdp_sft_trainer": {
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.warmup_steps_ratio": 0.1,
        "optim.lr_scheduler": "cosine",
    },
    "sft_trainer": {"optim.lr": 1e-3},
}
"""Where veRL's two trainers differ: program → key → default."""


@dataclass(frozen=True)
class Absent:
    """veRL keys without a counterpart."""

    pattern: str
    """Of dotted keys; `*` stands for anything."""
    reason: str
    asked_by: str = ""
    """The key that switches these on: without it they say nothing in veRL either, and are not listed."""


_ENGINES = "engines are set up under explorer.rollout_model, and load weights by weight sync"
_TURNS = "a conversation of several turns is a workflow here (docs/workflows.md, docs/agents.md)"
_SANDBOX = "code_reward runs code in a sandbox of its own (docs/rewards.md)"
_JUDGE = "a reward model or a judge is an entry of explorer.auxiliary_models (docs/rewards.md)"
_REWARD = "register a reward in a file of --plugin-dir, and name it as default_reward_fn_type (docs/rewards.md)"
_CORRECTION = "see algorithm.rollout_correction (docs/algorithms.md)"
_LOOP = "the loop is another one: see docs/architecture.md"
_LORA = "all weights are trained: there are no LoRA adapters"
_MEMORY = "memory is DeepSpeed's business: see trainer.zero_stage and fsdp_config's offloading"

ABSENT = (
    Absent("*.megatron.*", "DeepSpeed trains here, not Megatron: see trainer.zero_stage"),
    Absent("*engine*", "DeepSpeed trains here: see trainer.zero_stage"),
    Absent("*strategy", "DeepSpeed trains here: see trainer.zero_stage"),
    Absent("*.qat.*", "weights are not quantised in training", "*.qat.enable"),
    Absent("*.profiler.*", "profiling: see monitor.enable_ray_timeline"),
    Absent("global_profiler.*", "profiling: see monitor.enable_ray_timeline", "global_profiler.tool"),
    Absent("*profile*", "profiling: see monitor.enable_ray_timeline"),
    Absent("trainer.*nsight_options.*", "profiling: see monitor.enable_ray_timeline"),
    Absent("ray_*", "the run starts its own Ray, or joins cluster.ray_address"),
    Absent("trainer.ray_*", "the run starts its own Ray, or joins cluster.ray_address"),
    Absent("*lora?rank", _LORA),
    Absent("*.lora*", _LORA, "*lora?rank"),
    Absent("*target_modules", _LORA, "*lora?rank"),
    Absent("*exclude_modules", _LORA, "*lora?rank"),
    Absent("*layered_summon", _LORA, "*lora?rank"),
    Absent("*.mtp.*", "models are trained without multi-token prediction", "*.mtp.enable*"),
    Absent("*.tiled_mlp.*", _MEMORY, "*.tiled_mlp.enabled"),
    Absent("*.use_shm", "models are read from where they are"),
    Absent("*use_liger", "kernels are those of transformers; see trainer.torch_compile"),
    Absent("*fused_kernel*", "log-probs are always computed in chunks, without full logits"),
    Absent("*use_torch_compile", "see trainer.torch_compile"),
    Absent("*enable_activation_offload", _MEMORY),
    Absent("*use_remove_padding", "micro-batches hold hardly any padding: rows of like length go together"),
    Absent("*.rollout_n", "follows from rollout.n"),
    Absent("*.data_loader_seed", "each update takes the whole batch, in which the order of rows is of no consequence"),
    Absent("optim", "the optimizer is AdamW"),
    Absent("*.optim.optimizer*", "the optimizer is AdamW"),
    Absent("critic.loss_agg_mode", "the critic's loss is a mean over tokens"),
    Absent("critic.model.tokenizer_path", "the tokenizer is the policy's"),
    Absent("data.image_key", "text only: there are no images"),
    Absent("data.video_key", "text only: there are no videos"),
    Absent("data.audio_key", "text only: there is no sound"),
    Absent("data.image_patch_size", "text only: there are no images"),
    Absent("data.return_multi_modal_inputs", "text only: there are no images"),
    Absent("data.dataloader_num_workers", "rows are read once, when the run starts"),
    Absent("data.filter_overlong_prompts_workers", "rows are read once, when the run starts"),
    Absent("data.return_*", "rows keep all their columns"),
    Absent("data.reward_fn_key", "a reward is chosen for a task set, by default_reward_fn_type"),
    Absent("data.val_batch_size", "all tasks of an evaluation are given to the engines at once"),
    Absent("data.validation_shuffle", "an evaluation goes through its tasks in order"),
    Absent("data.gen_batch_size", "dynamic_sampling draws as many tasks as are missing"),
    Absent("data.custom_cls.*", "columns are named by format; other data is made by a task pipeline (docs/data.md)"),
    Absent("data.datagen.*", "tasks are made by a task pipeline (docs/data.md)"),
    Absent("data.sampler.*", "the order of tasks is a task_selector (docs/curricula.md)"),
    Absent("data.tokenizer", "the tokenizer is the model's"),
    Absent("data.balance_dp_token", "workers always get rows of about equal total length"),
    Absent(f"{ROLLOUT}.multi_turn.*", _TURNS, f"{ROLLOUT}.multi_turn.enable"),
    Absent(f"{ROLLOUT}.agent.*", _TURNS, f"{ROLLOUT}.multi_turn.enable"),
    Absent(f"{ROLLOUT}.prometheus.*", "see monitor.prometheus_port", f"{ROLLOUT}.prometheus.enable"),
    Absent(f"{ROLLOUT}.trace.*", "see monitor.traces_per_step", f"{ROLLOUT}.trace.backend"),
    Absent(f"{ROLLOUT}.disaggregation.*", _ENGINES, f"{ROLLOUT}.disaggregation.enabled"),
    Absent(f"{ROLLOUT}.name", "the engine is vLLM"),
    Absent(f"{ROLLOUT}.mode", "rollouts are always asynchronous"),
    Absent(f"{ROLLOUT}.do_sample", "answers are sampled; temperature 0 is greedy"),
    Absent(f"{ROLLOUT}.log_prob_*", "log-probs of rollouts come from the engine that sampled them"),
    Absent(f"{ROLLOUT}.calculate_log_probs", "log-probs of rollouts always come from the engine that sampled them"),
    Absent(f"{ROLLOUT}.max_model_len", "follows from max_prompt_tokens and max_response_tokens"),
    Absent(f"{ROLLOUT}.prompt_length", "follows from data.max_prompt_length"),
    Absent(f"{ROLLOUT}.response_length", "follows from data.max_response_length"),
    Absent(f"{ROLLOUT}.*", _ENGINES),
    Absent("reward_model.sandbox_fusion.*", _SANDBOX, "reward_model.sandbox_fusion.url"),
    Absent("reward.sandbox_fusion.*", _SANDBOX, "reward.sandbox_fusion.url"),
    Absent("reward_model.reward_kwargs.*", "arguments of a reward are reward_fn_args"),
    Absent("*overlong_buffer*", "see math_dapo_reward (docs/rewards.md)", "*overlong_buffer*.enable"),
    Absent("reward_model.*", _JUDGE, "reward_model.enable"),
    Absent("reward.reward_model.*", _JUDGE, "reward.reward_model.enable"),
    Absent("*custom_reward_function.*", _REWARD, "*custom_reward_function.path"),
    Absent("reward.reward_manager.*", _REWARD, "reward.reward_manager.module.path"),
    Absent("algorithm.pf_ppo.*", "rows are not reweighted", "algorithm.use_pf_ppo"),
    Absent("algorithm.use_pf_ppo", "rows are not reweighted; see replay_buffer for priorities"),
    Absent("algorithm.filter_groups.*", "see dynamic_sampling (docs/explorer.md)", "algorithm.filter_groups.enable"),
    Absent("algorithm.rollout_correction.*", _CORRECTION, "algorithm.rollout_correction.rollout_*"),
    Absent("distillation.*", "see algorithm_type on_policy_distill (docs/algorithms.md)", "distillation.enabled"),
    Absent("transfer_queue.*", "experiences lie in the store (docs/store.md)", "transfer_queue.enable"),
    Absent("skip.*", "rollouts of an earlier run are read by storage_type rollouts (docs/data.md)", "skip.*.enable"),
    Absent("trainer.v1.*", _LOOP),
    Absent("trainer.use_*", _LOOP),
    Absent("trainer.log_val_generations", "sampled rollouts of each evaluation are kept: see `trinity view`"),
    Absent("trainer.rollout_data_dir", "all rollouts are in the experience store: see `trinity view`"),
    Absent("trainer.validation_data_dir", "sampled rollouts of each evaluation are kept: see `trinity view`"),
    Absent("trainer.device", "the run takes GPUs where there are some, else the CPU"),
    Absent("trainer.resume_*", "see continue_from_checkpoint: a run resumes from its latest checkpoint"),
    Absent("trainer.default_hdfs_dir", "checkpoints go to checkpoint_root_dir"),
)
"""The first pattern that fits a key is its reason."""

SECTIONS = (
    Absent("optim.*", "no such setting of the optimizer here: see algorithm.optimizer"),
    Absent("model.*", "the model is taken as it is"),
    Absent("checkpoint.*", "a checkpoint is always whole"),
    Absent("ulysses_sequence_parallel_size", "each sequence is one worker's"),
    Absent("*fsdp*.*", _MEMORY),
    Absent("actor_rollout_ref.actor.policy_loss.*", "an argument of another loss"),
    Absent("actor_rollout_ref.actor.*", "no such setting of updates here: see docs/training.md"),
    Absent("actor_rollout_ref.ref.*", "the reference model is computed like the policy"),
    Absent("actor_rollout_ref.model.*", "the model is taken as it is"),
    Absent("critic.*", "the critic is trained like the policy"),
    Absent("data.*", "no such setting of data sets here: see docs/data.md"),
    Absent("reward*", "see docs/rewards.md"),
    Absent("algorithm.*", "no such setting of algorithms here: see docs/algorithms.md"),
    Absent("trainer.*", "no such setting of the loop here: see docs/training.md"),
)
"""Keys that stand neither above nor in the schema of `trainer.trainer_config`."""
