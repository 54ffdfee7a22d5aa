"""GRPO's advantages, except for tokens that would move the policy too far: M2PO, Clip_B.

Such a token gets an advantage of 0: it adds nothing to the loss, but still counts when the loss is averaged. The tokens
are selected once for the whole batch, before its first update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.group import Result, grpo
from trinity_core.algorithms.advantages.grouping import GroupIds, advantage
from trinity_core.algorithms.tensors import as_mask, clean, require_finite, without_gradient
from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage("m2po")
@without_gradient
def m2po(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rollout_ids: GroupIds | None = None,
    m2_threshold: float = 0.04,
    epsilon: float = 1e-6,
) -> Result:
    """GRPO's advantages; 0 where the second moment of the log-ratio to the sampling policy is too large (M2PO, Zheng et
    al. 2025, "Prosperity before collapse", algorithm 1).

    Considers the tokens that PPO might clip: A > 0 and log pi / mu > 0, or both negative. Of these, those with the
    largest squares are excluded until the mean square of the others is at most `m2_threshold`.
    """
    if not 0 <= m2_threshold < float("inf"):
        raise InputError(f"m2_threshold is a finite number of at least 0, not {m2_threshold}", key="m2_threshold")
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    log_ratio = clean(old_logprobs - rollout_logprobs, mask).double()
    places = (mask & (advantages * log_ratio > 0)).nonzero()
    squares, order = log_ratio[places[:, 0], places[:, 1]].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = int((means <= m2_threshold).sum())  # the running means of a sorted sequence never decrease
    left_out = places[order[kept:]]
    advantages[left_out[:, 0], left_out[:, 1]] = 0.0
    count = max(int(mask.sum()), 1)
    return advantages, metrics | {
        "m2po/second_moment": float(means[-1]) if len(means) else 0.0,
        "m2po/second_moment_kept": float(means[kept - 1]) if kept else 0.0,
        "m2po/masked": len(left_out) / count,
    }


@advantage("clipb")
@without_gradient
def clipb(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    entropies: Tensor,
    rollout_ids: GroupIds | None = None,
    mu: float = 2.5,
    epsilon: float = 1e-6,
) -> Result:
    """GRPO's advantages; 0 for tokens with A < 0 that would change the entropy most (Clip_B, arXiv 2602.03392).

    S = p (H + log p) for each sampled token, with its probability p and the entropy H at its position, in nats. Tokens
    with S below mean - `mu` deviations, both over all tokens of the batch, are excluded.
    """
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs, entropies=entropies)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    logprobs = clean(old_logprobs, mask).double()
    signal = logprobs.exp() * (clean(entropies, mask).double() + logprobs)
    tokens = signal[mask]
    deviation = float(tokens.std(correction=0)) if len(tokens) else 0.0
    low = mask & (advantages < 0) & (signal < tokens.mean() - mu * deviation) if deviation > 1e-12 else mask & False
    return torch.where(low, 0.0, advantages), metrics | {"clipb/masked": float(low.sum()) / max(len(tokens), 1)}
