"""Losses for rollouts and expert rows in one batch: (1 - mu) * PPO on rollouts + mu * SFT on the expert's rows.

Each term is averaged over its own tokens of the whole batch, so the balance does not depend on the numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from trinity_core.algorithms.losses.policy_loss import policy_loss
from trinity_core.algorithms.losses.ppo import ppo
from trinity_core.algorithms.losses.supervised import sft, sft_phi
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import clean
from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def mu_at(step: int, mu_warmup_steps: int, mu_decay_steps: int, mu_peak: float, mu_valley: float) -> float:
    """CHORD's weight of the expert (arXiv 2508.11408, section 3.1): linear to the peak, then a cosine to the valley."""
    if step < mu_warmup_steps:
        return mu_peak * step / mu_warmup_steps
    if step >= mu_warmup_steps + mu_decay_steps:
        return mu_valley
    progress = (step - mu_warmup_steps) / mu_decay_steps
    return mu_valley + (mu_peak - mu_valley) * (1 + math.cos(math.pi * progress)) / 2


def _split(mask: Tensor, is_expert: Tensor) -> tuple[Tensor, Tensor]:
    """The masks of the rollouts' and of the expert's tokens."""
    expert = is_expert[:, None].bool()
    return mask & ~expert, mask & expert


def _weights(mask: Tensor, aggregate: Callable[[Tensor], Tensor], is_expert: Tensor, mu: float) -> Tensor:
    if not 0 <= mu <= 1:
        raise InputError(f"mu is the expert's share of the loss, between 0 and 1, not {mu}")
    usual, expert = _split(mask, is_expert)
    return (1 - mu) * aggregate(usual) + mu * aggregate(expert)


def _mix_weights(mask: Tensor, aggregate: Callable[[Tensor], Tensor], is_expert: Tensor, mu: float = 0.1) -> Tensor:
    return _weights(mask, aggregate, is_expert, mu)


def _chord_weights(
    mask: Tensor,
    aggregate: Callable[[Tensor], Tensor],
    is_expert: Tensor,
    step: int = 0,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
) -> Tensor:
    mu = mu_at(step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    return _weights(mask, aggregate, is_expert, mu)


def _joined(
    logprobs: Tensor, mask: Tensor, is_expert: Tensor, expert_values: Tensor, advantages: Tensor,
    old_logprobs: Tensor | None, clip: dict[str, float | None],
) -> tuple[Tensor, Stats]:  # fmt: skip
    """PPO's values on rollouts and `expert_values` on expert tokens, with the stats of both under prefixes."""
    usual, expert = _split(mask, is_expert)
    old = None if old_logprobs is None else clean(old_logprobs, usual)
    values, stats = ppo.function(
        clean(logprobs, usual), usual, advantages=clean(advantages, usual), old_logprobs=old, **clip
    )
    return torch.where(expert, expert_values, values), {
        **{f"usual/{name}": stat for name, stat in stats.items()},
        "usual/pg_loss": (values.detach(), usual),
        "expert/sft_loss": (expert_values.detach(), expert),
    }


@policy_loss("mix", metric="loss", weigh=_mix_weights)
def mix(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    is_expert: Tensor,
    old_logprobs: Tensor | None = None,
    mu: float = 0.1,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """(1 - mu) PPO on rollouts + mu SFT on the expert's rows (`is_expert` [B]), whose advantages are ignored."""
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    clip["clip_ratio_c"] = clip_ratio_c
    expert_values, _ = sft.function(logprobs, mask)
    return _joined(logprobs, mask, is_expert, expert_values, advantages, old_logprobs, clip)


@policy_loss("mix_chord", metric="loss", weigh=_chord_weights)
def mix_chord(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    is_expert: Tensor,
    old_logprobs: Tensor | None = None,
    step: int = 0,
    mu_warmup_steps: int = 0,
    mu_decay_steps: int = 0,
    mu_peak: float = 0.1,
    mu_valley: float = 0.1,
    enable_phi_function: bool = True,
    cutoff_prob: float = 1.0,
    clip_range: float = 0.2,
    clip_range_low: float | None = None,
    clip_range_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Stats]:
    """`mix` with CHORD's schedule of mu over trainer steps and its weight p (1 - p) on the expert's tokens (arXiv
    2508.11408)."""
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    clip["clip_ratio_c"] = clip_ratio_c
    if enable_phi_function:
        expert_values, _ = sft_phi.function(logprobs, mask, cutoff_prob=cutoff_prob)
    else:
        expert_values, _ = sft.function(logprobs, mask)
    values, stats = _joined(logprobs, mask, is_expert, expert_values, advantages, old_logprobs, clip)
    mu = mu_at(step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    return values, stats | {"mu": (torch.full_like(values, mu), mask)}
