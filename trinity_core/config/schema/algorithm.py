"""The `algorithm` section: how experiences become an update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trinity_core.config.types import (
    DERIVED,
    EMPTY,
    Args,
    Betas,
    Count,
    Derived,
    NonNegative,
    Positive,
    Section,
    Share,
    StepsOrNone,
    Unit,
)


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: Positive = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    lr_warmup_steps: StepsOrNone = 0
    """Warm-up: steps over which the learning rate rises linearly from 0. Give this or `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Share = 0.0
    """Warm-up as a share of all training steps."""
    warmup_style: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: `constant`, or a decay to `min_lr_ratio`."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of `cosine` and `linear`, as a share of `lr`."""


class AlgorithmConfig(Section):
    """A named algorithm and its parts; each part can be replaced on its own.

    Modules in `plugin_dir` can add parts and algorithms. Given arguments are merged into the algorithm's defaults.
    """

    algorithm_type: str = "ppo"
    """The algorithm: a named set of defaults for its parts, such as advantage, losses and aggregation."""
    repeat_times: Derived[Count] = DERIVED
    """Rollouts per task; by default the algorithm's own number. Always 2 for `dpo` (a pair) and 1 for `sft`."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The policy's optimizer and learning-rate schedule."""
    sample_strategy: Derived[str] = DERIVED
    """How the trainer draws experiences from the buffer."""
    sample_strategy_args: Args = EMPTY
    """Arguments of the sample strategy."""
    advantage_fn: Derived[str] = DERIVED
    """How rewards become advantages; `none` for supervised losses."""
    advantage_fn_args: Args = EMPTY
    """Arguments of the advantage function, such as `gamma` and `lam`."""
    policy_loss_fn: Derived[str] = DERIVED
    """The policy loss."""
    policy_loss_fn_args: Args = EMPTY
    """Arguments of the policy loss, such as `clip_range`."""
    kl_penalty_fn: Derived[str] = DERIVED
    """Estimator of the KL divergence from the reference model that is subtracted from the reward; `none` disables
    it."""
    kl_penalty_fn_args: Args = EMPTY
    """Arguments of the KL penalty, such as `kl_coef`."""
    kl_loss_fn: Derived[str] = DERIVED
    """Estimator of the KL divergence from the reference model that is added to the loss; `none` disables it."""
    kl_loss_fn_args: Args = EMPTY
    """Arguments of the KL loss, such as `kl_coef`."""
    entropy_loss_fn: Derived[str] = DERIVED
    """Entropy bonus; `none` disables it."""
    entropy_loss_fn_args: Args = EMPTY
    """Arguments of the entropy bonus, such as `entropy_coef`."""
    loss_agg_mode: Derived[str] = DERIVED
    """How per-token losses are aggregated into one number."""
    loss_agg_mode_args: Args = EMPTY
    """Arguments of the aggregation, such as the fixed length."""
    rollout_correction: Derived[str] = DERIVED
    """Correction of the gap between the rollout engine's and the trainer's log-probs; `none` only measures it."""
    rollout_correction_args: Args = EMPTY
    """Arguments of the correction, such as its cap."""
    max_rollout_gap: Annotated[Positive, Unit("nats")] | None = None
    """Largest allowed mean gap between the log-probs of engine and trainer in a run's first update, where their weights
    are equal; a larger gap ends the run. Null: 0.01 in float32, 0.1 in 16 bits, 0.3 with an fp8 engine."""
