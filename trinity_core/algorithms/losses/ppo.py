"""PPO's clipped surrogate and variants: a hard limit on the ratio (GSPO, GMPO, CISPO, SPPO), or a soft one (SAPO)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, TypeAlias

from annotated_types import Gt

from trinity_core.algorithms.losses.policy_loss import clip_bounds, clip_ranges, log_ratio_to, policy_loss, ratio_to
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import first_token, row_mean
from trinity_core.base.lazy import torch
from trinity_core.config.types import NonNegative, Number, Positive

if TYPE_CHECKING:
    from torch import Tensor

DualClip: TypeAlias = Annotated[Number, Gt(1)] | None


def _clipped(
    ratio: Tensor, advantages: Tensor, bounds: tuple[float, float], dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return max(-A r, -A clip(r)), at most -A dual where A < 0, and where the PPO clip and the dual clip are
    active."""
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(*bounds)
    values = torch.maximum(plain, limited)
    clipped = limited > plain
    if dual is None:
        return values, clipped, torch.zeros_like(clipped)
    bound = -advantages * dual
    lower = (advantages < 0) & (values > bound)
    return torch.where(lower, bound, values), clipped, lower


@policy_loss("ppo", scales_with_advantages=True)
def ppo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: DualClip = 3.0,
    log_ratio_cap: float = 20.0,
    off_policy_mask_threshold: float | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7; two ranges: DAPO, 2503.14476, eq. 8).

    Where A < 0 it is at most -A `clip_ratio_c` (dual clip, arXiv 1912.09729; None: no such bound), and 0 in sequences
    whose mean log mu / pi exceeds `off_policy_mask_threshold` (DeepSeek-V3.2, 2512.02556, eq. 9; None: no such mask).
    """
    bounds = clip_bounds(clip_range, clip_range_low, clip_range_high)
    log_ratio = log_ratio_to(old_logprobs, logprobs, log_ratio_cap)
    if old_logprobs is None:
        values, zero = -advantages * (1 + log_ratio), torch.zeros_like(logprobs)
        stats: Stats = dict.fromkeys(("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"), (zero, mask))
    else:
        values, clipped, lower = _clipped(log_ratio.exp(), advantages, bounds, clip_ratio_c)
        stats = {"pg_clipfrac": (clipped, mask), "pg_clipfrac_lower": (lower, mask), "ppo_kl": (-log_ratio, mask)}
    if off_policy_mask_threshold is not None and rollout_logprobs is not None:
        drift = row_mean((rollout_logprobs - logprobs).detach(), mask)
        dropped = (advantages < 0) & (drift > off_policy_mask_threshold)
        values, stats["off_policy_masked"] = torch.where(dropped, 0.0, values), (dropped, mask)
    return values, stats


@policy_loss("gspo", loss_agg_mode="seq-mean-token-mean", scales_with_advantages=True)
def gspo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    clip_range: NonNegative | None = None,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clip on s = exp(mean_t log r_t), one ratio a sequence (GSPO, arXiv 2507.18071, eq. 5 to 7).

    Written per token (GSPO-token, eq. 13 to 14): s with the gradient of each token. With one advantage a sequence and
    `seq-mean-token-mean`, value and gradient are those of GSPO. Without `clip_range`, the lower range is 0.0003 and the
    upper 0.0004.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    mean = row_mean(log_ratio.detach(), mask)
    ratio = mean.exp() * (1 + logprobs - logprobs.detach())
    if clip_range is None:
        clip_range_low = 0.0003 if clip_range_low is None else clip_range_low
        clip_range_high = 0.0004 if clip_range_high is None else clip_range_high
    bounds = clip_bounds(clip_range or 0.0, clip_range_low, clip_range_high)
    values, clipped, _ = _clipped(ratio, advantages, bounds, None)
    return values, {
        "pg_clipfrac": (clipped, mask),
        "ppo_kl": (-log_ratio, mask),
        "ppo_kl_seq": (-mean.expand(mask.shape), first_token(mask)),
    }


@policy_loss("gmpo", loss_agg_mode="seq-mean-token-mean", scales_with_advantages=True)
def gmpo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    clip_range: NonNegative = 0.4,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
) -> tuple[Tensor, Stats]:
    """-A exp(mean_t c_t), c_t = min(log r_t, high) where A > 0, max(log r_t, -low) elsewhere: the geometric mean of the
    clipped ratios (GMPO, arXiv 2507.20673, eq. 4 and algorithm 1).

    The ranges bound log r_t, not r_t. The value is the same at all tokens of a sequence with one advantage.
    """
    low, high = clip_ranges(clip_range, clip_range_low, clip_range_high)
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    limited = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    mean = row_mean(limited, mask)
    return -advantages * mean.exp(), {
        "pg_clipfrac": (limited != log_ratio, mask),
        "ppo_kl": (-log_ratio, mask),
        "ppo_kl_seq": (-row_mean(log_ratio.detach(), mask).expand(mask.shape), first_token(mask)),
    }


@policy_loss("cispo", metric="cispo_loss", scales_with_advantages=True)
def cispo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    clip_range_low: NonNegative = 1.0,
    clip_range_high: NonNegative = 0.28,
    mask_clipped: bool = False,
) -> tuple[Tensor, Stats]:
    """-A sg(clip(r, 1 - low, 1 + high)) log pi: the weight is clipped, no token loses its gradient (CISPO, MiniMax-M1,
    arXiv 2506.13585, section 3; a low of 1 means no lower bound).

    `mask_clipped` also drops the tokens that PPO's clip would drop.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs).detach()
    ratio = log_ratio.exp()
    low, high = clip_bounds(0.0, clip_range_low, clip_range_high)
    outside = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    kept = ~outside if mask_clipped else torch.ones_like(mask)
    values = -advantages * ratio.clamp(low, high) * kept * logprobs
    return values, {
        "pg_clipfrac": ((ratio < low) | (ratio > high), mask),
        "masked_frac": (~kept, mask),
        "ppo_kl": (-log_ratio, mask),
    }


@policy_loss("sapo", loss_agg_mode="seq-mean-token-mean", scales_with_advantages=True)
def sapo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> tuple[Tensor, Stats]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the advantage's sign: a soft gate instead of the clip, whose slope at r
    = 1 is the plain policy gradient (SAPO, arXiv 2511.20347)."""
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    ratio = ratio_to(old_logprobs, logprobs)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -advantages * gate, {"ppo_kl": (-log_ratio, mask), "ratio/mean": (ratio, mask)}


@policy_loss("sppo", metric="sppo_loss", ratio_to_rollout=True, scales_with_advantages=True)
def sppo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    epsilon: Positive = 0.3,
) -> tuple[Tensor, Stats]:
    """-A log clip(r, 1 / (1 + epsilon), 1 + epsilon): PPO for the softmax's own geometry (sPPO, arXiv 2108.05828)."""
    bound = math.log1p(epsilon)
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    return -advantages * log_ratio.clamp(-bound, bound), {
        "pg_clipfrac": (log_ratio.abs() > bound, mask),
        "ppo_kl": (-log_ratio, mask),
    }
