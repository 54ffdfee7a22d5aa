"""The critic's loss: squared error to the returns, with values clipped around the old ones as in PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import clean

if TYPE_CHECKING:
    from torch import Tensor


def value_tokens(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor, cliprange_value: float
) -> tuple[Tensor, Stats]:
    """Per token max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2, 0 at masked tokens (arXiv 1506.02438 with the clip of
    OpenAI's PPO2); all `[B, T]`. Aggregated like policy losses."""
    values, returns, old = (clean(each, mask) for each in (values, returns, old_values))
    limited = old + (values - old).clamp(-cliprange_value, cliprange_value)
    plain_error, limited_error = (values - returns).square(), (limited - returns).square()
    losses = clean(plain_error.maximum(limited_error) / 2, mask)
    return losses, {
        "critic/vf_clipfrac": (limited_error > plain_error, mask),
        "critic/vpred_mean": (values, mask),
    }
