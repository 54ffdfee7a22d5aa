"""Checkpoints written synchronously by one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from trinity_core.training import checkpoint
from trinity_core.training.distributed import Ranks
from trinity_core.training.learner import Learner
from trinity_core.training.publish import Publisher
from trinity_core.training.saving import CheckpointWriter, Copying


def save(learner: Learner, step: int, folder: Path) -> None:
    """Write the whole state after `step` to `folder`."""
    _write(step, folder, lambda copying: checkpoint.copy(learner, step, copying))


def keep_for_resume(publisher: Publisher, step: int, folder: Path) -> None:
    """Copy the versions into `folder` that explorers would need after a resume at `step`."""
    _write(step, folder, lambda copying: publisher.keep_for_resume(step, copying))


def _write(step: int, folder: Path, copy: Callable[[Copying], None]) -> None:
    writer = CheckpointWriter(Ranks(0, 1, torch.device("cpu")))
    with writer.start(step, folder, [0], 0, lambda written: None) as copying:
        copy(copying)
    writer.close()
