"""The trainer's settings, native and veRL's, as one typed value; number formats and ZeRO stages."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from trinity_core.config.schema import Config, OptimizerConfig
from trinity_core.config.schema.trainer import LearnerKeys
from trinity_core.config.schema.verl import CriticKeys
from trinity_core.config.types import Args, Section

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def dtype_of(asked: str | None, on_gpu: bool) -> str:
    """Return the requested dtype; by default (None, `auto`) bfloat16 on a GPU, float32 on the CPU."""
    if asked and asked != "auto":
        return asked
    return "bfloat16" if on_gpu else "float32"


def zero_stage_of(asked: int | None, workers: int, dtype: str, offloads: bool = False) -> int:
    """Return the effective ZeRO stage for a requested one (None: 0, unless `zero_stage_that_fits` says otherwise).

    Stage 0 does without DeepSpeed: weights and gradients are whole, and Adam's state is shared out over the workers. So
    1 means 0, and for a single worker, which has nothing to partition, 2 does too. It is 2 if the trainer `offloads`
    the optimizer's state or uses float16, because offloading and loss scaling are DeepSpeed's.
    """
    stage = asked or 0
    if dtype == "float16" or offloads:
        return max(stage, 2)
    return 0 if stage < 2 or (workers == 1 and stage == 2) else stage


REDUCE_BUCKET = 50_000_000
"""Gradients summed over the workers at a time (`reduce_bucket_size`): 100 MB in half precision, enough to saturate a
link. DeepSpeed's default, 500 million, holds ten times as much on every GPU."""
MAX_LIVE = 1_000_000_000
"""Maximum number of weights that ZeRO 3 gathers ahead (`stage3_max_live_parameters`); DeepSpeed's default."""
AT_ONCE_ON_CPU = 4_000_000
"""Both limits on a CPU, where ranks share one memory, and ZeRO's gathering and reducing are copies within it."""
RETENTION = 100
"""Train steps whose rows stay in the store for inspection, besides those that a rewind may need."""
GPU_CONTEXT = 3 << 29
"""GPU memory of a process besides its tensors, even while it sleeps: CUDA's context, libraries and their workspaces.
Assumed, not measured."""


class UpdateSettings(Section):
    """How a model is trained, the policy or the critic."""

    optimizer: OptimizerConfig
    grad_clip: float
    epochs: int
    """Updates per batch."""
    use_dynamic_bsz: bool
    micro_batch_size: int | None
    """Rows per micro-batch and worker if `use_dynamic_bsz` is false; None: as many as tokens allow."""
    max_tokens: int
    """Tokens per micro-batch and worker."""
    gradient_checkpointing: bool
    torch_compile: bool | None
    """None: on GPUs, where rows are packed."""
    param_offload: bool
    """True if weights are to be in host memory between uses: under ZeRO 3 (see `kept_on_gpu`)."""
    optimizer_offload: bool
    """True if the optimizer's state is in host memory, under ZeRO 2 and 3."""
    model_overrides: Args
    """Changes to the model's own configuration."""


class CriticSettings(CriticKeys, UpdateSettings):
    """How the critic is trained: keys that are read unchanged, and those below."""

    model_path: str
    warmup_steps: int
    """Initial steps in which only the critic is trained."""


class TrainSettings(LearnerKeys, UpdateSettings):
    """How the policy is trained: keys of `trainer` that are read unchanged, and those below."""

    reference_micro_batch_size: int | None
    reference_max_tokens: int
    """Tokens per micro-batch in a forward pass of the reference model."""
    reference_offload: bool
    save_huggingface: Literal["always", "last", "never"]
    """Which checkpoints also contain the model in Hugging Face format."""
    critic: CriticSettings | None
    """None if the algorithm has no critic."""

    @property
    def offloads_weights(self) -> bool:
        """True if `param_offload` is asked for, of the policy or the critic."""
        return self.param_offload or (self.critic is not None and self.critic.param_offload)

    def zero_stage_for(self, workers: int, dtype: str) -> int:
        """Return the ZeRO stage of policy and critic for this number of workers."""
        offloads = self.optimizer_offload or (self.critic is not None and self.critic.optimizer_offload)
        return zero_stage_of(self.zero_stage, workers, dtype, offloads)


def kept_on_gpu(config: Config, colocated: bool) -> str:
    """Return why weights stay on the GPU although `param_offload` asks for host memory, which takes ZeRO 3; "" if they
    do not. `colocated`: engine and trainer take turns on the GPU."""
    trainer, lora = config.trainer, config.model.lora
    if colocated:
        return "engine and trainer take turns on the GPU, and what does not fit beside the engine moves anyway"
    if lora is not None and lora.load_in_4bit:
        return "4-bit weights (load_in_4bit) are not partitioned"
    if trainer.torch_compile:
        return "trainer.torch_compile cannot go with ZeRO 3, which it takes"
    return "" if trainer.zero_stage in (None, 3) else f"trainer.zero_stage is {trainer.zero_stage}, and it takes 3"


def train_settings(config: Config) -> TrainSettings:
    """Return the trainer's settings of a resolved configuration."""
    trainer, verl = config.trainer, config.trainer.trainer_config
    actor, reference = verl.actor_rollout_ref.actor, verl.actor_rollout_ref.ref
    return TrainSettings(
        **_same(trainer, LearnerKeys) | {"torch_compile": _compiles(config)},
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
    return {name: getattr(section, name) for name in keys.model_fields}


def _budget(config: Config, tokens: int) -> int:
    """Return the tokens per micro-batch and worker: at least one sequence of `max_model_len`."""
    return max(tokens, config.model.max_model_len)


def _compiles(config: Config) -> bool | None:
    """Return `trainer.torch_compile`, false by default where nobody has tried it."""
    trainer, lora = config.trainer, config.model.lora
    untried = trainer.zero_stage == 3 or trainer.ulysses_sequence_parallel_size > 1
    untried = untried or (lora is not None and lora.load_in_4bit)
    return False if untried and trainer.torch_compile is None else trainer.torch_compile


def _critic(config: Config) -> CriticSettings:
    verl = config.trainer.trainer_config
    critic, actor = verl.critic, verl.actor_rollout_ref.actor
    dynamic = config.trainer.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    return CriticSettings(
        **_same(critic, CriticKeys),
        model_path=config.model.critic_model_path,
        optimizer=critic.optim,
        epochs=critic.ppo_epochs or actor.ppo_epochs,
        use_dynamic_bsz=dynamic,
        micro_batch_size=critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        max_tokens=_budget(config, critic.ppo_max_token_len_per_gpu or 2 * config.trainer.max_token_len_per_gpu),
        gradient_checkpointing=critic.model.enable_gradient_checkpointing,
        torch_compile=_compiles(config),
        param_offload=critic.model.fsdp_config.param_offload,
        optimizer_offload=critic.model.fsdp_config.optimizer_offload,
        model_overrides=critic.model.override_config,
        warmup_steps=verl.trainer.critic_warmup,
    )
