"""Clip_V: tokens of failures that would change the entropy unlike the average of their position are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.group import grpo
from trinity_core.algorithms.advantages.grouping import GroupIds, advantage
from trinity_core.algorithms.tensors import as_mask, clean, require_finite, without_gradient
from trinity_core.base.lazy import torch
from trinity_core.config.types import NonNegative, Share

if TYPE_CHECKING:
    from torch import Tensor

    from trinity_core.algorithms.logprobs import Head


@without_gradient
def expected_signals(hidden: Tensor, head: Head, temperature: float | Tensor = 1.0, chunk: int | None = None) -> Tensor:
    """[K]: the expectation over the vocabulary of S = p (H + log p), which is H sum p^2 + sum p^2 log p, at each
    position; H is the entropy in nats. Arguments as of `divergence_from_teacher`."""
    from trinity_core.algorithms.logprobs import Slices, reduce_slices

    slices = Slices(hidden, *head, 1.0 / temperature, chunk)
    log_total = reduce_slices(slices, torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device), False)[1]
    entropy, squares, products = (torch.zeros_like(log_total) for _ in range(3))
    for start, end in slices.bounds():
        logprobs = slices.logits(start, end).sub_(log_total)
        p = logprobs.exp()
        entropy -= (p * logprobs).sum(1, keepdim=True)
        squares += p.square().sum(1, keepdim=True)
        products += (p.square() * logprobs).sum(1, keepdim=True)
    return (entropy * squares + products).squeeze(1)


@advantage("clipv")
@without_gradient
def clipv(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    entropies: Tensor,
    expected_signals: Tensor,
    rollout_ids: GroupIds | None = None,
    mu: NonNegative = 8.5,
    max_frac: Share = 1e-4,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """GRPO's advantages; 0 for tokens with A < 0 whose deviation D = E[S] - S exceeds `mu` standard deviations of D
    over the batch's tokens (Clip_V, arXiv 2602.03392).

    S = p (H + log p) of the sampled token, and E[S] = `expected_signals` [B, T] its mean over the vocabulary. At most
    the share `max_frac` of the batch's tokens is left out, but always one: those with the largest D. Trinity-RFT, which
    has the same bound, also leaves them out of the loss's mean.
    """
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs, entropies=entropies, expected_signals=expected_signals)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    logprobs, entropy, expected = (clean(x, mask).double() for x in (old_logprobs, entropies, expected_signals))
    deviations = expected - logprobs.exp() * (entropy + logprobs)
    tokens = deviations[mask]
    spread = float(tokens.std(correction=0)) if len(tokens) else 0.0
    candidates = mask & (advantages < 0) & (deviations > mu * spread) & (spread > 1e-12)
    count = min(int(candidates.sum()), max(int(max_frac * len(tokens)), 1))
    places = deviations.masked_fill(~candidates, -torch.inf).flatten().topk(count).indices
    advantages.view(-1)[places] = 0.0
    return advantages, metrics | {"clipv/masked": count / max(len(tokens), 1), "clipv/deviation": spread}
