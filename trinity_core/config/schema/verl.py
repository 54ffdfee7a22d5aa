"""`trainer.trainer_config`: fine-grained settings in veRL's words.

A key that also has a native setting is another spelling of it (`SameAs`), with its type and its doc; a key without a
counterpart in a DeepSpeed trainer is accepted and does nothing (`NoEffect`); the others are read through
`train_settings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trinity_core.config.schema.algorithm import OptimizerConfig
from trinity_core.config.schema.model import ModelConfig
from trinity_core.config.schema.trainer_keys import TrainerKeys
from trinity_core.config.section import Section
from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Betas,
    Count,
    Derived,
    Flag,
    Integer,
    Many,
    NoEffect,
    NonNegative,
    Positive,
    SameAs,
    Share,
    StepsOrNone,
    Tokens,
)


class VerlFsdp(Section):
    """Where weights and optimizer state live."""

    param_offload: Flag = False
    """Keep weights in host memory between uses: a reference model's always, others' under ZeRO 3."""
    optimizer_offload: Flag = False
    """Keep the optimizer's state in host memory, under ZeRO 1 to 3."""
    wrap_policy: NoEffect = None
    """FSDP's unit of sharding."""
    fsdp_size: NoEffect = None
    """FSDP's group size."""
    forward_prefetch: NoEffect = None
    """FSDP's prefetching."""
    model_dtype: NoEffect = None
    """Number format of the weights; see `trainer.dtype`."""


class VerlModel(Section):
    """The policy as a module."""

    enable_gradient_checkpointing: Annotated[Any, SameAs(TrainerKeys, "gradient_checkpointing")] = None
    override_config: Args = EMPTY
    """Changes to the model's own configuration."""
    trust_remote_code: Annotated[Any, SameAs(ModelConfig, "trust_remote_code")] = None
    use_remove_padding: NoEffect = None
    """Micro-batches never hold more padding than their rows' difference in length."""
    use_fused_kernels: NoEffect = None
    """Log-probs are always computed in chunks, without full logits."""
    fused_kernel_options: NoEffect = None
    """Backend of fused kernels."""
    external_lib: NoEffect = None
    """Module imported before the model."""


class VerlCheckpoint(Section):
    """Parts of a checkpoint."""

    load_contents: NoEffect = None
    """A checkpoint is always loaded whole."""
    save_contents: Many[Literal["model", "optimizer", "extra", "hf_model"]] = (
        "model",
        "optimizer",
        "extra",
    )
    """`hf_model` adds the model in Hugging Face format; the other parts are always saved."""


class VerlActorOptim(Section):
    """The policy's optimizer."""

    lr: Annotated[Any, SameAs(OptimizerConfig, "lr")] = None
    weight_decay: Annotated[Any, SameAs(OptimizerConfig, "weight_decay")] = None
    betas: Annotated[Any, SameAs(OptimizerConfig, "betas")] = None
    lr_warmup_steps: Annotated[Integer | None, SameAs(OptimizerConfig, "lr_warmup_steps")] = None
    """Warm-up steps; a negative number leaves them to `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Annotated[Any, SameAs(OptimizerConfig, "lr_warmup_steps_ratio")] = None
    min_lr_ratio: Annotated[Any, SameAs(OptimizerConfig, "min_lr_ratio")] = None
    warmup_style: Annotated[Any, SameAs(OptimizerConfig, "warmup_style")] = None
    total_training_steps: NoEffect = None
    """Known from `buffer`."""


class VerlActor(Section):
    """Updates of the policy."""

    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rows of one micro-batch of one worker, where `use_dynamic_bsz` is false."""
    use_dynamic_bsz: Annotated[Any, SameAs(TrainerKeys, "use_dynamic_bsz")] = None
    ppo_max_token_len_per_gpu: Annotated[Any, SameAs(TrainerKeys, "max_token_len_per_gpu")] = None
    grad_clip: Annotated[Any, SameAs(TrainerKeys, "grad_clip")] = None
    ulysses_sequence_parallel_size: Annotated[Any, SameAs(TrainerKeys, "ulysses_sequence_parallel_size")] = None
    ppo_epochs: Count = 1
    """Updates made from each batch."""
    shuffle: NoEffect = None
    """Each update takes the whole batch, in which the order of rows is of no consequence."""
    checkpoint: VerlCheckpoint = Field(default_factory=VerlCheckpoint)
    """Parts of a checkpoint."""
    optim: VerlActorOptim = Field(default_factory=VerlActorOptim)
    """Optimizer."""
    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""
    strategy: NoEffect = None
    """Sharding is DeepSpeed's; see `trainer.zero_stage`."""
    ppo_mini_batch_size: NoEffect = None
    """Follows from `buffer.train_batch_size`."""
    ppo_micro_batch_size: NoEffect = None
    """Replaced by `ppo_micro_batch_size_per_gpu`."""
    entropy_from_logits_with_chunking: NoEffect = None
    """Entropy is always computed in chunks."""
    entropy_checkpointing: NoEffect = None
    """Entropy is always recomputed in the backward pass."""


class VerlRef(Section):
    """The reference model."""

    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""
    log_prob_micro_batch_size_per_gpu: Count | None = None
    """Rows of one forward pass of one worker, where `use_dynamic_bsz` is false; by default the actor's."""
    log_prob_max_token_len_per_gpu: Tokens | None = None
    """Tokens of one forward pass of one worker; by default the actor's."""
    log_prob_use_dynamic_bsz: NoEffect = None
    """Follows the actor's."""
    log_prob_micro_batch_size: NoEffect = None
    """Replaced by `log_prob_micro_batch_size_per_gpu`."""
    ulysses_sequence_parallel_size: NoEffect = None
    """Follows the actor's."""
    entropy_from_logits_with_chunking: NoEffect = None
    """The reference model gives no entropy."""
    entropy_checkpointing: NoEffect = None
    """The reference model gives no entropy."""


class VerlActorRolloutRef(Section):
    """The policy, and the reference model."""

    model: VerlModel = Field(default_factory=VerlModel)
    """The policy as a module."""
    actor: VerlActor = Field(default_factory=VerlActor)
    """Updates of the policy."""
    ref: VerlRef = Field(default_factory=VerlRef)
    """The reference model."""
    rollout: NoEffect = None
    """Rollouts are set up under `explorer`."""
    hybrid_engine: NoEffect = None
    """Engines and trainer are always apart."""


class VerlCriticOptim(Section):
    """The critic's optimizer."""

    lr: Positive = 1e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means."""
    lr_warmup_steps: Integer = -1
    """Warm-up steps; a negative number leaves them to `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all steps."""
    min_lr_ratio: Share | None = None
    """Share of `lr` at the end; null means 0."""
    warmup_style: Literal["constant", "cosine", "linear"] = "constant"
    """Course after the warm-up."""
    total_training_steps: NoEffect = None
    """Known from `buffer`."""


class VerlCriticModel(Section):
    """The critic as a module."""

    path: Annotated[Any, SameAs(ModelConfig, "critic_model_path")] = None
    enable_gradient_checkpointing: Derived[Flag] = DERIVED
    """Recompute activations in the backward pass; by default as for the policy."""
    override_config: Args = EMPTY
    """Changes to the model's own configuration."""
    fsdp_config: VerlFsdp = Field(default_factory=VerlFsdp)
    """Offloading."""
    use_remove_padding: NoEffect = None
    """Micro-batches never hold more padding than their rows' difference in length."""
    external_lib: NoEffect = None
    """Module imported before the model."""


class CriticKeys(Section):
    """The keys of the critic that the learner reads as they are."""

    grad_clip: NonNegative = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    cliprange_value: Positive = 0.5
    """How far a value may move from the one the advantages were computed with."""


class VerlCritic(CriticKeys):
    """Updates of the critic."""

    model: VerlCriticModel = Field(default_factory=VerlCriticModel)
    """The critic as a module."""
    optim: VerlCriticOptim = Field(default_factory=VerlCriticOptim)
    """Optimizer."""
    ppo_micro_batch_size_per_gpu: Count | None = None
    """Rows of one micro-batch of one worker, where `use_dynamic_bsz` is false; by default the actor's."""
    use_dynamic_bsz: Flag | None = None
    """Fill micro-batches by tokens; by default as for the policy."""
    ppo_max_token_len_per_gpu: Tokens | None = None
    """Tokens of one micro-batch of one worker; by default twice the policy's."""
    ppo_epochs: Count | None = None
    """Updates made from each batch; by default the policy's."""
    shuffle: NoEffect = None
    """Each update takes the whole batch, in which the order of rows is of no consequence."""
    forward_micro_batch_size_per_gpu: NoEffect = None
    """Values are computed in the micro-batches of the update."""
    forward_max_token_len_per_gpu: NoEffect = None
    """Values are computed in the micro-batches of the update."""
    ulysses_sequence_parallel_size: NoEffect = None
    """Follows the actor's."""
    ppo_micro_batch_size: NoEffect = None
    """Replaced by `ppo_micro_batch_size_per_gpu`."""
    ppo_mini_batch_size: NoEffect = None
    """Follows from `buffer.train_batch_size`."""
    strategy: NoEffect = None
    """Sharding is DeepSpeed's."""
    checkpoint: NoEffect = None
    """A critic's checkpoint is always whole."""


class VerlTrainer(Section):
    """The training loop."""

    critic_warmup: StepsOrNone = 0
    """Steps in which only the critic is trained."""
    balance_batch: NoEffect = None
    """Workers always get rows of about equal total length."""
    max_actor_ckpt_to_keep: Annotated[Any, SameAs(TrainerKeys, "max_checkpoints_to_keep")] = None
    max_critic_ckpt_to_keep: NoEffect = None
    """Actor and critic are kept together."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Kept at `auto`; see `continue_from_checkpoint`."""
    resume_from_path: str | None = None
    """Kept empty; see `continue_from_checkpoint`."""
    remove_previous_ckpt_in_save: NoEffect = None
    """See `max_actor_ckpt_to_keep`."""
    del_local_ckpt_after_load: NoEffect = None
    """Checkpoints are never removed on loading."""
    default_hdfs_dir: NoEffect = None
    """Checkpoints go to `checkpoint_root_dir`."""
    total_training_steps: Annotated[Any, SameAs(TrainerKeys, "total_steps")] = None


class VerlConfig(Section):
    """A veRL trainer configuration."""

    actor_rollout_ref: VerlActorRolloutRef = Field(default_factory=VerlActorRolloutRef)
    """The policy, and the reference model."""
    critic: VerlCritic = Field(default_factory=VerlCritic)
    """Updates of the critic."""
    trainer: VerlTrainer = Field(default_factory=VerlTrainer)
    """The training loop."""
