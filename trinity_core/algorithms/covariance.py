"""Losses that restrain the tokens which would lower or raise the entropy most (Clip-Cov, KL-Cov, high entropy)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.group import grpo
from trinity_core.algorithms.advantages.grouping import GroupIds, advantage
from trinity_core.algorithms.losses.policy_loss import log_ratio_to, policy_loss, ratio_to
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import as_mask, clean, masked_mean, require_finite, without_gradient
from trinity_core.base.lazy import torch
from trinity_core.config.algorithm_types import GRPO, NO_KL, register_algorithm
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


def covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float64 (A - mean A)(log pi - mean log pi) of each token, means over the tokens of the batch (arXiv
    2505.22617, eq. 10); 0 at masked tokens."""
    A, logp = clean(advantages.double(), mask), clean(logprobs.double(), mask)
    return clean((A - masked_mean(A, mask)) * (logp - masked_mean(logp, mask)), mask)


@advantage("clip_cov")
@without_gradient
def clip_cov(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    rollout_ids: GroupIds | None = None,
    share: NonNegative = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's advantages; 0 for tokens drawn (by `seed`) from those whose covariance lies between `cov_low` and
    `cov_high`: `share` of the batch's tokens, at least one (Clip-Cov, arXiv 2505.22617, eq. 11 and 12)."""
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    cov = covariances(advantages, old_logprobs, mask)
    places = (mask & (cov > cov_low) & (cov < cov_high)).nonzero()
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).to(places.device)
    drawn = places[order[: max(int(share * int(mask.sum())), 1)]]
    advantages[drawn[:, 0], drawn[:, 1]] = 0.0
    return advantages, metrics | {"clip_cov/masked": len(drawn) / max(int(mask.sum()), 1)}


def highest(cov: Tensor, mask: Tensor, share: float) -> Tensor:
    """[B, T] float32: 1 at the tokens of highest covariance, `share` of the batch's tokens and at least one."""
    count = max(int(share * int(mask.sum())), 1)
    places = cov.masked_fill(~mask, -math.inf).flatten().topk(min(count, int(mask.sum()))).indices
    return torch.zeros(cov.numel(), device=cov.device).index_fill_(0, places, 1.0).view_as(cov)


@advantage("kl_cov")
@without_gradient
def kl_cov(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    rollout_ids: GroupIds | None = None,
    share: NonNegative = 2e-4,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float], None, Tensor]:
    """GRPO's advantages, and for the loss `kl_cov` the `share` of the batch's tokens with the highest covariance
    (KL-Cov, arXiv 2505.22617, eq. 13)."""
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    selected = highest(covariances(advantages, old_logprobs, mask), mask, share)
    return advantages, metrics | {"kl_cov/selected": float(selected.sum()) / max(int(mask.sum()), 1)}, None, selected


@policy_loss("kl_cov")
def kl_cov_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    selected: Tensor,
    old_logprobs: Tensor | None = None,
    kl_coef: NonNegative = 1.0,
) -> tuple[Tensor, Stats]:
    """-A r, and + `kl_coef` |log r| at the selected tokens (KL-Cov, arXiv 2505.22617, eq. 14), r = pi / pi_old.

    `selected` [B, T] is 1 or 0, from the advantage `kl_cov`, which sees the whole batch. In the first update on a batch
    r is 1 and the penalty has no gradient: it acts with `ppo_epochs` above 1, or on rollouts of older weights.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    penalty = kl_coef * selected * log_ratio.abs()
    return penalty - advantages * ratio_to(old_logprobs, logprobs), {"ppo_kl": (-log_ratio, mask)}


@advantage("high_entropy")
@without_gradient
def high_entropy(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    entropies: Tensor,
    rollout_ids: GroupIds | None = None,
    share: NonNegative = 0.2,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's advantages; 0 but for the `share` of the batch's tokens with the highest entropy, ties included (arXiv
    2506.01939, eq. 5 and 6). `entropies` [B, T] are the policy's at each position, in nats."""
    mask = as_mask(mask)
    require_finite(mask, entropies=entropies)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    tokens = entropies.double()[mask].sort().values
    least = tokens[math.ceil((1 - min(share, 1.0)) * (len(tokens) - 1))] if len(tokens) else tokens.sum()
    return torch.where(mask & (entropies >= least), advantages, 0.0), metrics | {"high_entropy/least": float(least)}


register_algorithm(
    replace(
        GRPO,
        name="kl_cov",
        advantage_fn="kl_cov",
        advantage_fn_args={"share": 2e-4},
        policy_loss_fn="kl_cov",
        policy_loss_fn_args={"kl_coef": 1.0},
        **NO_KL,
    )
)
register_algorithm(
    replace(
        GRPO,
        name="clip_cov",
        advantage_fn="clip_cov",
        advantage_fn_args={"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        **NO_KL,
    )
)
