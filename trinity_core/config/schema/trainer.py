"""The `trainer` section: how one update is computed, and when a checkpoint is saved."""

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
    Steps,
    StepsOrNone,
    Tokens,
)


class LearnerKeys(Section):
    """The keys that the learner reads as they are: `train_settings` passes each of them on under the same name."""

    grad_clip: NonNegative = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    use_dynamic_bsz: Flag = True
    """Fill micro-batches up to `max_token_len_per_gpu` tokens rather than a number of rows."""
    zero_stage: Annotated[Integer, Ge(0), Le(3)] | None = None
    """ZeRO stage; null means 0 for one worker and 2 for several. One worker has nothing to partition: 1 and 2 mean 0
    for it, unless it offloads its optimizer or has `float16`. Otherwise 0 and 1 mean 2 with 16-bit weights (`dtype`,
    the default on GPUs)."""
    worker_num: Count | None = None
    """Workers; null means one for each GPU left by the engines, 1 on the CPU."""
    gradient_checkpointing: Flag = False
    """Recompute activations in the backward pass: less memory, more time."""
    torch_compile: Flag = False
    """Compile the model's layers: a step takes a sixth less, the first start 20 s more. On the CPU it needs a C++
    compiler. Not with ZeRO 3."""
    ulysses_sequence_parallel_size: Count = 1
    """Workers that share each sequence, by DeepSpeed's Ulysses: activations of long answers are divided among them. A
    micro-batch then holds `max_token_len_per_gpu` tokens of each."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Number format of forward and backward; null means bfloat16 on GPUs and float32 on the CPU."""


class LoopKeys(Section):
    """The keys that are read by others than the learner, or that it needs in another form."""

    name: str = "trainer"
    """Name of the trainer."""
    trainer_type: Literal["verl", "deepspeed"] = "verl"
    """Backend; both names mean DeepSpeed here."""
    save_interval: StepsOrNone = 100
    """Steps between checkpoints; 0 means only at the end. The last step is always saved."""
    total_steps: Steps | None = None
    """Another place for `buffer.total_steps`."""
    save_strategy: Literal["single_thread", "single_process", "single_node", "unrestricted"] = "unrestricted"
    """How many workers may write a checkpoint at once."""
    save_hf_checkpoint: Literal["always", "last", "never"] = "never"
    """Which checkpoints also hold the model in Hugging Face format; `trinity convert` adds it to any."""
    max_checkpoints_to_keep: Count | None = None
    """Older checkpoints beyond this number are removed; null keeps all."""
    max_token_len_per_gpu: Tokens = 16384
    """Tokens of one micro-batch of one worker."""


class TrainerConfig(LearnerKeys, LoopKeys):
    """The DeepSpeed workers that train."""

    trainer_config: VerlConfig = Field(default_factory=VerlConfig)
    """Settings in veRL's words."""
    trainer_config_path: str = ""
    """YAML file with the same settings; give this or `trainer_config`."""
