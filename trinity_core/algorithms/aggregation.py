"""Aggregations reduce per-token losses `[B, T]` to one number.

An aggregation is defined by the weight it gives each token: loss = (weights * values).sum(). The weights come from the
mask of the *whole* batch, so the loss and its gradient do not depend on the division into micro-batches or ranks: each
uses its slice of the weights, and the sums add up exactly.
A row without action tokens (padding, an empty answer) does not count as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity_core.algorithms.tensors import as_mask, clean, require_finite
from trinity_core.base.lazy import torch
from trinity_core.base.registry import Registry
from trinity_core.config.types import Positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Aggregation:
    """A named weighting of tokens. The trainer uses `weights`; calling it reduces values to a scalar."""

    name: str
    function: Callable[..., Tensor]
    """(mask [B, T] bool, **args) -> weights [B, T] float64; weights of masked tokens are ignored."""

    def weights(self, mask: Tensor, *, dtype: torch.dtype | None = None, **args: Any) -> Tensor:
        """[B, T] weights, float32 by default, from the mask of the whole batch; 0 at masked tokens."""
        mask = as_mask(mask)
        return clean(self.function(mask, **args), mask).to(dtype or torch.float32)

    def __call__(self, values: Tensor, mask: Tensor, **args: Any) -> Tensor:
        """The aggregated scalar of `[B, T]` values. Raises InputError for a NaN or infinity at an action token."""
        mask = as_mask(mask)
        require_finite(mask, values=values)
        return (clean(values, mask) * self.weights(mask, dtype=values.dtype, **args)).sum()


AGGREGATIONS: Registry[Aggregation] = Registry("aggregation", leading=1, functions=lambda rule: (rule.function,))


def aggregation(name: str) -> Callable[[Callable[..., Tensor]], Aggregation]:
    """Decorator: register a function (mask, **args) -> weights as `AGGREGATIONS[name]`."""

    def add(function: Callable[..., Tensor]) -> Aggregation:
        return AGGREGATIONS.register(name)(Aggregation(name, function))

    return add


def _lengths(mask: Tensor) -> Tensor:
    """[B, 1] float64: number of action tokens of each row."""
    return mask.sum(-1, keepdim=True).double()


def _rows(mask: Tensor) -> Tensor:
    """Scalar float64: number of rows with action tokens, at least 1."""
    return mask.any(-1).sum().clamp(min=1).double()


@aggregation("token-mean")
def token_mean(mask: Tensor) -> Tensor:
    """Every token counts the same: 1 / sum_i |o_i| (DAPO, arXiv 2503.14476, eq. 8)."""
    return (1 / mask.sum().clamp(min=1).double()).expand(mask.shape)


@aggregation("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor) -> Tensor:
    """Every sequence's sum counts the same: 1 / B."""
    return (1 / _rows(mask)).expand(mask.shape)


@aggregation("seq-mean-token-mean")
def seq_mean_token_mean(mask: Tensor) -> Tensor:
    """Every sequence's mean counts the same: 1 / (B |o_i|) (GRPO, arXiv 2402.03300, eq. 3)."""
    return (1 / (_rows(mask) * _lengths(mask).clamp(min=1))).expand(mask.shape)


@aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, normalizer: Positive | None = None) -> Tensor:
    """Every sequence's sum over a fixed length: 1 / (B L), without bias to length (Dr. GRPO, arXiv 2503.20783, app. A).

    `normalizer` is L in tokens, usually the longest response allowed; by default the width of the mask.
    """
    length = mask.shape[-1] if normalizer is None else normalizer
    return (1 / (_rows(mask) * length)).expand(mask.shape)
