"""Advantages that leave out the tokens which would lower or raise the entropy most."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.group import grpo
from trinity_core.algorithms.advantages.grouping import GroupIds, advantage
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
    """GRPO's advantages; 0 but for the `share` of the batch's tokens with the highest entropy (arXiv 2506.01939, eq. 5
    and 6). `entropies` [B, T] are the policy's at each position, in nats."""
    mask = as_mask(mask)
    require_finite(mask, entropies=entropies)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    tokens = entropies.double()[mask].sort().values
    least = tokens[math.ceil((1 - min(share, 1.0)) * (len(tokens) - 1))] if len(tokens) else tokens.sum()
    return torch.where(mask & (entropies >= least), advantages, 0.0), metrics | {"high_entropy/least": float(least)}


register_algorithm(
    replace(
        GRPO,
        name="clip_cov",
        advantage_fn="clip_cov",
        advantage_fn_args={"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        **NO_KL,
    )
)
