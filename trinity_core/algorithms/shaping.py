"""Reward shaping before advantages: the penalty for overlong responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(lengths_B: Tensor, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """[B] DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13), to be added to the rewards.

    0 up to max_length - cache_length tokens, then falling linearly to -factor at max_length, and -factor beyond.
    """
    if not 0 < cache_length <= max_length:
        raise InputError(f"the overlong penalty needs 0 < cache_length <= max_length, not {cache_length}, {max_length}")
    excess = lengths_B.to(torch.float32) - (max_length - cache_length)
    return -factor * (excess / cache_length).clamp(0, 1)
