"""The critic's loss: squared error to the returns, with values clipped around the old ones as in PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.aggregation import AGGREGATIONS
from trinity_core.algorithms.metric_accumulator import MetricAccumulator, Stats
from trinity_core.algorithms.tensors import as_mask, clean, require_finite
from trinity_core.base.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def value_tokens(
    values: Tensor, returns: Tensor, mask: Tensor, old_values: Tensor | None = None, cliprange_value: float = 0.5
) -> tuple[Tensor, Stats]:
    """Per token max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2, 0 at masked tokens (arXiv 1506.02438 with the clip of
    OpenAI's PPO2); all `[B, T]`. Without `old_values` there is no clip. Aggregated like policy losses."""
    if cliprange_value <= 0:
        raise InputError(f"cliprange_value must be positive, not {cliprange_value}", key="cliprange_value")
    values, returns = clean(values, mask), clean(returns, mask)
    old = values.detach() if old_values is None else clean(old_values, mask)
    limited = old + (values - old).clamp(-cliprange_value, cliprange_value)
    plain_error, limited_error = (values - returns).square(), (limited - returns).square()
    losses = clean(plain_error.maximum(limited_error) / 2, mask)
    return losses, {
        "critic/vf_clipfrac": (limited_error > plain_error, mask),
        "critic/vpred_mean": (values, mask),
    }


def value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    old_values: Tensor | None = None,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, dict[str, float]]:
    """Return the whole batch's scalar loss and metrics. Raises InputError for a NaN or infinity at an action token."""
    mask = as_mask(mask)
    require_finite(mask, values=values, returns=returns, old_values=old_values)
    losses, stats = value_tokens(values, returns, mask, old_values, cliprange_value)
    loss = AGGREGATIONS[loss_agg_mode](losses, mask)
    accumulator = MetricAccumulator()
    accumulator.means(stats)
    accumulator.total("critic/vf_loss", loss)
    return loss, accumulator.metrics()
