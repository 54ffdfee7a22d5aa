"""Arithmetic over masked `[B, T]` tensors: B rows (sequences), T response positions, mask true on action tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_gradient(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.no_grad()` as a decorator that imports torch only when the function is called."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def clean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values where the mask is true and 0 elsewhere, so that a NaN at a masked token has no effect.

    Applied to inputs before any arithmetic, so the gradient of a masked token is exactly 0 as well.
    """
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def require_finite(mask_BT: Tensor, **tensors: Tensor | None) -> None:
    """Raise InputError for a shape other than the mask's, or a NaN or infinity at an action token."""
    for name, values in tensors.items():
        if values is None:
            continue
        if values.shape != mask_BT.shape:
            raise InputError(
                f"{name} has shape {tuple(values.shape)}, but the mask has {tuple(mask_BT.shape)}", key=name
            )
        bad = ~torch.isfinite(values) & mask_BT
        if bool(bad.any()):
            row, position = (int(i) for i in bad.nonzero()[0])
            raise InputError(
                f"{name} is {float(values[row, position].detach())} at row {row}, token {position}"
                f" ({int(bad.sum())} such tokens); a loss over it would turn every weight to NaN",
                key=name,
            )


def as_mask(mask: Tensor) -> Tensor:
    """Return the mask as bool. Raises InputError unless it has two dimensions."""
    if mask.dim() != 2:
        raise InputError(f"a mask is [B, T], this one has shape {tuple(mask.shape)}", key="mask")
    return mask if mask.dtype == torch.bool else mask != 0


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Scalar mean over the action tokens; 0 without any."""
    return clean(values_BT, mask_BT).sum() / mask_BT.sum().clamp(min=1)


def row_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, 1] sum over each row's action tokens."""
    return clean(values_BT, mask_BT).sum(-1, keepdim=True)


def row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, 1] mean over each row's action tokens; 0 for a row without any."""
    return row_sum(values_BT, mask_BT) / mask_BT.sum(-1, keepdim=True).clamp(min=1)


def first_token(mask_BT: Tensor) -> Tensor:
    """[B, T] bool, true at each row's first action token, where values of the whole row are stored."""
    return mask_BT & (mask_BT.cumsum(-1) == 1)


def last_token(mask_BT: Tensor) -> Tensor:
    """[B, T] bool, true at each row's last action token, where the sequence's reward is stored."""
    return mask_BT & (mask_BT.flip(-1).cumsum(-1).flip(-1) == 1)


def divided(deviations: Tensor, scales: Tensor, epsilon: float) -> Tensor:
    """deviations / (scales + epsilon); 0 where that would be 0 / 0."""
    return deviations / (scales + epsilon).clamp(min=torch.finfo(deviations.dtype).tiny)


def whiten(values_BT: Tensor, mask_BT: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale to mean 0 and (sample) variance 1 over the action tokens: (x - mean) / sqrt(var + epsilon).

    Equal values, or a single token, become 0.
    """
    values = clean(values_BT.double(), mask_BT)
    count = mask_BT.sum()
    deviation = clean(values - values.sum() / count.clamp(min=1), mask_BT)
    variance = deviation.square().sum() / (count - 1).clamp(min=1)
    return (deviation * torch.rsqrt(variance + epsilon)).to(values_BT.dtype)
