"""The `trainer` section: how updates are computed, and when checkpoints are saved."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from trinity_core.config.schema.verl import VerlConfig
from trinity_core.config.types import (
    Count,
    Flag,
    Integer,
    NonNegative,
    Section,
    StepsOrNone,
    Tokens,
)


class LearnerKeys(Section):
    """Keys that `train_settings` passes to the learner unchanged."""

    grad_clip: NonNegative = 1.0
    """Maximum norm of the gradient; 0 disables clipping."""
    use_dynamic_bsz: Flag = True
    """Fill micro-batches up to `max_token_len_per_gpu` tokens instead of a number of rows."""
    zero_stage: Annotated[Integer, Ge(0), Le(3)] | None = None
    """ZeRO stage. With 0 or 1 each worker has all weights and gradients, and a share of Adam's state: fastest if they
    fit. Null means 0 on a CPU; on GPUs 3 with `param_offload`, else 0 where by `trinity plan` a worker then fits one,
    else 2. One worker has nothing to partition: 2 means 0. If the optimizer is offloaded or `dtype` is `float16`, 0 and
    1 mean 2."""
    worker_num: Count | None = None
    """Number of workers; null means one per GPU left by the engines, 1 on the CPU."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, more time."""
    torch_compile: Flag | None = None
    """Compile the model's layers: steps take less time, the first start more. Null means on GPUs, for models whose rows
    are packed, unless weights are in 4 bits or workers share sequences. On the CPU it needs a C++ compiler. Not with
    ZeRO 3."""
    ulysses_sequence_parallel_size: Count = 1
    """Number of workers that share each sequence (DeepSpeed Ulysses), which divides the activations of long answers. A
    micro-batch then holds `max_token_len_per_gpu` tokens of each."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Number format of forward and backward passes; null means bfloat16 on GPUs and float32 on the CPU."""


class LoopKeys(Section):
    """Keys that other parts than the learner read, or that it needs in another form."""

    name: str = "trainer"
    """Name of the trainer."""
    save_interval: StepsOrNone = 100
    """Steps between checkpoints; 0 means only at the end. The last step is always saved."""
    save_strategy: Literal["single_thread", "single_process", "single_node", "unrestricted"] = "unrestricted"
    """How many workers may write a checkpoint at once."""
    save_hf_checkpoint: Literal["always", "last", "never"] = "never"
    """Which checkpoints also contain the model in Hugging Face format; `trinity convert` can add it to any."""
    max_checkpoints_to_keep: Count | None = None
    """Maximum number of checkpoints to keep; older ones are removed. Null keeps all."""
    max_token_len_per_gpu: Tokens = 16384
    """Tokens per micro-batch and worker."""


class TrainerConfig(LearnerKeys, LoopKeys):
    """The DeepSpeed workers that train."""

    trainer_config: VerlConfig = Field(default_factory=VerlConfig)
    """Settings under veRL's keys."""
    trainer_config_path: str = ""
    """YAML file with the same settings; give this or `trainer_config`."""
