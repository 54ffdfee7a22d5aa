"""The trainer's settings, native and veRL's, as one typed value; number formats and ZeRO stages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from trinity_core.config.schema import Config, OptimizerConfig
from trinity_core.config.schema.trainer import LearnerKeys
from trinity_core.config.schema.verl import CriticKeys
from trinity_core.config.types import Args

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_of(asked: str | None, on_gpu: bool) -> str:
    """The dtype that was asked for; by default (None, `auto`) bfloat16 on a GPU, float32 on the CPU."""
    if asked and asked != "auto":
        return asked
    return "bfloat16" if on_gpu else "float32"


def zero_stage_of(asked: int | None, workers: int, dtype: str, offloads: bool = False) -> int:
    """The ZeRO stage in force, by the one that was asked for: by default 0 for one worker and 2 for several.

    One worker has nothing to partition: 1 and 2 are 0 for it, unless it `offloads` the optimiser's state, which is
    DeepSpeed's, or has float16, whose loss scale is. Otherwise it is at least 2 in half precision: DeepSpeed's stage 1
    sums the gradients of micro-batches in half precision.
    """
    stage = (0 if workers == 1 else 2) if asked is None else asked
    if workers == 1 and stage < 3 and dtype != "float16" and not offloads:
        return 0
    return stage if dtype == "float32" else max(stage, 2)


REDUCE_BUCKET = 50_000_000
"""Gradients that are summed over the workers at a time (`reduce_bucket_size`): 100 MB in half precision, enough for a
link's whole bandwidth. DeepSpeed's default, 500 million, holds ten times as much on every GPU."""
MAX_LIVE = 1_000_000_000
"""Weights that ZeRO 3 gathers ahead at most (`stage3_max_live_parameters`), as DeepSpeed does by default."""
AT_ONCE_ON_CPU = 4_000_000
"""Both limits on a CPU: ranks there share one memory, and what ZeRO gathers and reduces is copied within it."""
RETENTION = 100
"""Train steps whose rows stay in the store for inspection, besides those that a rewind may need."""
GPU_CONTEXT = 3 << 29
"""Bytes of a GPU that a process on it holds besides its tensors, also while it sleeps: CUDA's context, libraries and
their workspaces. Assumed, not measured."""


class CriticSettings(CriticKeys):
    """How the critic is trained: the keys that are read as they are, and those below."""

    model_path: str
    optimizer: OptimizerConfig
    epochs: int
    """Updates from each batch."""
    use_dynamic_bsz: bool
    micro_batch_size: int | None
    """Rows of one micro-batch of one worker where `use_dynamic_bsz` is false; None: as many as tokens allow."""
    max_tokens: int
    """Tokens of one micro-batch of one worker."""
    gradient_checkpointing: bool
    torch_compile: bool
    param_offload: bool
    optimizer_offload: bool
    model_overrides: Args
    warmup_steps: int
    """Steps at the start in which only the critic is trained."""


class TrainSettings(LearnerKeys):
    """How the policy is trained: the keys of `trainer` that are read as they are, and those below."""

    optimizer: OptimizerConfig
    epochs: int
    """Updates from each batch."""
    micro_batch_size: int | None
    """Rows of one micro-batch of one worker where `use_dynamic_bsz` is false; None: as many as tokens allow."""
    max_tokens: int
    """Tokens of one micro-batch of one worker."""
    reference_micro_batch_size: int | None
    reference_max_tokens: int
    """Tokens of a micro-batch in a forward pass of the reference model."""
    param_offload: bool
    """Weights in host memory between uses; the policy's under ZeRO 3, the reference model's under any."""
    optimizer_offload: bool
    """The optimiser's state in host memory, under ZeRO 1 to 3."""
    reference_offload: bool
    model_overrides: Args
    """Changes to the model's own configuration."""
    save_huggingface: Literal["always", "last", "never"]
    """Which checkpoints also hold the model in Hugging Face format."""
    critic: CriticSettings | None
    """None where the algorithm has no critic."""

    def zero_stage_for(self, workers: int, dtype: str) -> int:
        """The ZeRO stage of policy and critic, for this many workers."""
        offloads = self.optimizer_offload or (self.critic is not None and self.critic.optimizer_offload)
        return zero_stage_of(self.zero_stage, workers, dtype, offloads)


def train_settings(config: Config) -> TrainSettings:
    """The trainer's settings of a resolved configuration."""
    trainer, verl = config.trainer, config.trainer.trainer_config
    actor, reference = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.ref
    return TrainSettings(
        **_same(trainer, LearnerKeys),
        optimizer=config.algorithm.optimizer,
        epochs=actor.ppo_epochs,
        micro_batch_size=actor.ppo_micro_batch_size_per_gpu,
        max_tokens=_budget(config, trainer.max_token_len_per_gpu),
        reference_micro_batch_size=reference.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        reference_max_tokens=_budget(config, reference.log_prob_max_token_len_per_gpu or trainer.max_token_len_per_gpu),
        param_offload=actor.fsdp_config.param_offload,
        optimizer_offload=actor.fsdp_config.optimizer_offload,
        reference_offload=reference.fsdp_config.param_offload,
        model_overrides=verl.actor_rollout_ref.model.override_config,
        save_huggingface="always" if "hf_model" in actor.checkpoint.save_contents else trainer.save_hf_checkpoint,
        critic=_critic(config) if config.needs_critic else None,
    )


def _same(section: BaseModel, keys: type[BaseModel]) -> dict[str, Any]:
    """The values of these keys, by name."""
    return {name: getattr(section, name) for name in keys.model_fields}


def _budget(config: Config, tokens: int) -> int:
    """Tokens of a micro-batch of one worker: at least one sequence of `max_model_len`."""
    return max(tokens, config.model.max_model_len)


def _critic(config: Config) -> CriticSettings:
    verl = config.trainer.trainer_config
    critic, actor = verl.critic, verl.actor_rollout_ref.actor
    optim = critic.optim
    dynamic = config.trainer.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    return CriticSettings(
        **_same(critic, CriticKeys),
        model_path=config.model.critic_model_path,
        optimizer=OptimizerConfig(
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=optim.betas,
            lr_warmup_steps=max(optim.lr_warmup_steps, 0),
            lr_warmup_steps_ratio=optim.lr_warmup_steps_ratio,
            warmup_style=optim.warmup_style,
            min_lr_ratio=optim.min_lr_ratio or 0.0,
        ),
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        use_dynamic_bsz=dynamic,
        micro_batch_size=critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        max_tokens=_budget(config, critic.ppo_max_token_len_per_gpu or 2 * config.trainer.max_token_len_per_gpu),
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        torch_compile=config.trainer.torch_compile,
        param_offload=critic.model.fsdp_config.param_offload,
        optimizer_offload=critic.model.fsdp_config.optimizer_offload,
        model_overrides=critic.model.override_config,
        warmup_steps=verl.trainer.critic_warmup,
    )
