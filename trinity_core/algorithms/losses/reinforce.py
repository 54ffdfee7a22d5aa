"""Losses linear in log pi or in the ratio: REINFORCE, importance sampling, OPMD, TOPR, REC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from trinity_core.algorithms.losses.policy_loss import log_ratio_to, policy_loss, ratio_to
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import row_mean, row_sum
from trinity_core.base.lazy import torch
from trinity_core.base.signatures import ActsWith
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("reinforce", scales_with_advantages=True)
def reinforce(logprobs: Tensor, mask: Tensor, *, advantages: Tensor) -> tuple[Tensor, Stats]:
    """-A log pi (Williams 1992): on tokens of the current policy, the plain policy gradient."""
    return -advantages * logprobs, {}


@policy_loss("importance_sampling", scales_with_advantages=True)
def importance_sampling(
    logprobs: Tensor, mask: Tensor, *, advantages: Tensor, old_logprobs: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """-A r without a clip; the log-ratio is clamped to +-20."""
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    ratio = ratio_to(old_logprobs, logprobs)
    return -advantages * ratio, {
        "ratio/mean": (ratio, mask),
        "approx_kl": (-log_ratio, mask),
        "ppo_kl": (-log_ratio, mask),
    }


@policy_loss("opmd", metric="opmd_loss", scales_with_advantages=True)
def opmd(logprobs: Tensor, mask: Tensor, *, advantages: Tensor, tau: NonNegative = 1.0) -> tuple[Tensor, Stats]:
    """-A log pi / (1 + tau): one step of online policy mirror descent from the current policy (arXiv 2505.17826,
    section on off-policy algorithms; Kimi k1.5, 2501.12599, section 2.3.2). tau = 0 is AsymRE's loss (2506.20520)."""
    return -advantages * logprobs / (1 + tau), {}


@policy_loss("topr", metric="topr_loss", ratio_to_rollout=True, scales_with_advantages=True)
def topr(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    advantage_threshold: float = 0.0,
    level: Literal["sequence", "token"] = "sequence",
) -> tuple[Tensor, Stats]:
    """-A sg(a) log pi, a = 1 where A > threshold, else min(pi / mu, 1) (TOPR, arXiv 2503.14286).

    The ratio is the sequence's, as in the paper, or each token's with `level: token`. `old_logprobs` are those of the
    sampling policy mu.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs).detach()
    log_weight = row_sum(log_ratio, mask) if level == "sequence" else log_ratio
    tapered = log_weight.clamp(max=0).exp().expand(mask.shape)
    weight = torch.where(advantages > advantage_threshold, torch.ones_like(tapered), tapered)
    return -advantages * weight * logprobs, {"topr/weight": (weight, mask), "ppo_kl": (-log_ratio, mask)}


def _in_range(
    clip_mode: str, ratio: Tensor, row_ratio: Tensor, advantages: Tensor, inner: tuple[float, float],
    outer: tuple[float, float],
) -> Tensor:  # fmt: skip
    """[B, T] bool: the tokens that REC's clip keeps."""
    up, down = advantages >= 0, advantages <= 0
    if clip_mode == "none":
        return torch.ones_like(ratio, dtype=torch.bool)
    if clip_mode in ("one-side", "gspo-one-side"):
        r = ratio if clip_mode == "one-side" else row_ratio
        return (up & (r <= inner[1])) | (down & (r >= inner[0]))
    within = (ratio >= inner[0]) & (ratio <= inner[1])
    if clip_mode == "two-side":
        return within
    return within | (up & (ratio <= outer[0])) | (down & (ratio >= outer[1]))


@policy_loss("rec", ratio_to_rollout=True)
def rec(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    clip_mode: Literal["none", "one-side", "gspo-one-side", "two-side", "ring"] = "none",
    weight: Literal["none", "importance_sampling", "gspo_importance_sampling", "advantage"] = "none",
    epsilon_low: Annotated[NonNegative, ActsWith("clip_mode")] = 0.2,
    epsilon_high: Annotated[NonNegative, ActsWith("clip_mode")] = 0.2,
    epsilon_low_prime: Annotated[NonNegative, ActsWith("clip_mode", "ring")] = 0.6,
    epsilon_high_prime: Annotated[NonNegative, ActsWith("clip_mode", "ring")] = 2.0,
    regularizer: Literal["none", "k2", "forward-kl"] = "none",
    regularizer_coef: Annotated[float, ActsWith("regularizer")] = 0.0,
    temp: Annotated[float, ActsWith("weight", "advantage")] = 1.0,
) -> tuple[Tensor, Stats]:
    """-A w M log pi + regularizer: group-relative REINFORCE whose clip M only masks (arXiv 2509.24203, section 4).

    M (`clip_mode`): none; `one-side`, r at most 1 + high where A >= 0, at least 1 - low where A <= 0; `two-side`;
    `ring`, two-side or beyond the outer limits on the harmless side; `gspo-one-side` on the sequence's geometric mean.
    w (`weight`): none, `importance_sampling` (r), `gspo_importance_sampling`, `advantage` (exp(A / temp)).
    `regularizer`: none, `k2` (coef * (log r)^2), `forward-kl` (-coef * log pi). r has no gradient in M and w.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    ratio = log_ratio.detach().exp()
    row_ratio = row_mean(log_ratio.detach(), mask).exp().expand(mask.shape)
    inner, outer = (1 - epsilon_low, 1 + epsilon_high), (1 - epsilon_low_prime, 1 + epsilon_high_prime)
    kept = _in_range(clip_mode, ratio, row_ratio, advantages, inner, outer)
    weights = {
        "none": torch.ones_like(ratio),
        "importance_sampling": ratio,
        "gspo_importance_sampling": row_ratio,
        "advantage": (advantages / temp).exp(),
    }
    values = -advantages * weights[weight] * kept * logprobs
    if regularizer == "k2":
        values = values + regularizer_coef * log_ratio.square()
    elif regularizer == "forward-kl":
        values = values - regularizer_coef * logprobs
    return values, {"pg_clipfrac": (~kept, mask), "ppo_kl": (-log_ratio, mask)}
