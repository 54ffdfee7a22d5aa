"""`trainer.trainer_config`: the fine-grained settings that only exist under veRL's keys.

`trinity_core.config.foreign.verl_keys` handles veRL's further keys.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trinity_core.config.schema.algorithm import OptimizerConfig
from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Count,
    Derived,
    Flag,
    Many,
    NonNegative,
    Positive,
    Section,
    StepsOrNone,
    Tokens,
)


class VerlFsdp(Section):
    """Where weights and optimizer state are held."""

    param_offload: Flag = False
    """Hold weights in host memory between uses. Those of policy and critic take ZeRO 3, which `zero_stage: null` then
    means, unless weights have 4 bits, layers are compiled, or engine and trainer take turns on the GPU."""
    optimizer_offload: Flag = False
    """Hold the optimizer's state in host memory, under ZeRO 2 and 3."""


class VerlModel(Section):
    """The policy as a module."""

    override_config: Args = EMPTY
    """Changes to the model's own configuration, in the trainer and in the engines."""


class VerlCheckpoint(Section):
    """Parts of a checkpoint."""

    save_contents: Many[Literal["model", "optimizer", "extra", "hf_model"]] = (
        "model",
        "optimizer",
        "extra",
    )
    """`hf_model` adds the model in Hugging Face format; the other parts are always saved."""


class VerlActorOptim(Section):
    """The policy's optimizer."""


class VerlActor(Section):
    """Updates of the policy."""

    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rows per micro-batch and worker if `use_dynamic_bsz` is false."""
    ppo_epochs: Count = 1
    """Updates per batch."""
    checkpoint: VerlCheckpoint = Field(default_factory=VerlCheckpoint)
    """Parts of a checkpoint."""
    optim: VerlActorOptim = Field(default_factory=VerlActorOptim)
    """Optimizer."""
    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""


class VerlRef(Section):
    """The reference model."""

    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Rows per forward pass and worker if `use_dynamic_bsz` is false; by default the actor's."""
    log_prob_max_token_len_per_gpu: Tokens | None = None
    """Tokens per forward pass and worker; by default the actor's."""


class VerlActorRolloutRef(Section):
    """The policy, and the reference model."""

    model: VerlModel = Field(default_factory=VerlModel)
    """The policy as a module."""
    actor: VerlActor = Field(default_factory=VerlActor)
    """Updates of the policy."""
    ref: VerlRef = Field(default_factory=VerlRef)
    """The reference model."""


class VerlCriticOptim(OptimizerConfig):
    """The critic's optimizer."""

    lr: Positive = 1e-5
    """Peak learning rate."""


class VerlCriticModel(Section):
    """The critic as a module."""

    enable_gradient_checkpointing: Derived[Flag] = DERIVED
    """Recompute activations in the backward pass; by default as for the policy."""
    override_config: Args = EMPTY
    """Changes to the model's own configuration."""
    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""


class CriticKeys(Section):
    """The critic's keys that the learner reads unchanged."""

    grad_clip: NonNegative = 1.0
    """Maximum norm of the gradient; 0 disables clipping."""
    cliprange_value: Positive = 0.5
    """Maximum change of a value from the one used for the advantages (value clipping)."""


class VerlCritic(CriticKeys):
    """Updates of the critic."""

    model: VerlCriticModel = Field(default_factory=VerlCriticModel)
    """The critic as a module."""
    optim: VerlCriticOptim = Field(default_factory=VerlCriticOptim)
    """Optimizer."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rows per micro-batch and worker if `use_dynamic_bsz` is false; by default the actor's."""
    use_dynamic_bsz: Flag | None = None
    """Fill micro-batches by tokens; by default as for the policy."""
    ppo_max_token_len_per_gpu: Tokens | None = None
    """Tokens per micro-batch and worker; by default twice the policy's."""
    ppo_epochs: Count | None = None
    """Updates per batch; by default the policy's."""


class VerlTrainer(Section):
    """The training loop."""

    critic_warmup: StepsOrNone = 0
    """Steps in which only the critic is trained."""


class VerlConfig(Section):
    """A veRL trainer configuration."""

    actor_rollout_ref: VerlActorRolloutRef = Field(default_factory=VerlActorRolloutRef)
    """The policy, and the reference model."""
    critic: VerlCritic = Field(default_factory=VerlCritic)
    """Updates of the critic."""
    trainer: VerlTrainer = Field(default_factory=VerlTrainer)
    """The training loop."""
