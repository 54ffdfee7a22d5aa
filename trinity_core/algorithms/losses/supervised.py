"""Losses on given answers: SFT, its weighted forms, DPO on pairs, and mixtures with rollouts.

A mixture is (1 - mu) * PPO on rollouts + mu * SFT on expert rows. Each term is averaged over its own tokens of the
whole batch, so the balance does not depend on the numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from trinity_core.algorithms.losses.policy_loss import policy_loss
from trinity_core.algorithms.losses.ppo import DualClip, ppo
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import clean, first_token, row_sum
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.signatures import ActsWith
from trinity_core.config.types import NonNegative, Number, Positive, PositiveShare, Share

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("sft", metric="sft_loss", corrects_rollouts=False)
def sft(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """-log pi: the cross-entropy of the given tokens."""
    return -logprobs, {}


@policy_loss("sft_weighted", metric="sft_loss", corrects_rollouts=False, scales_with_advantages=True)
def sft_weighted(logprobs: Tensor, mask: Tensor, *, advantages: Tensor) -> tuple[Tensor, Stats]:
    """-w log pi, with w passed as `advantages`: RAFT's selection of rows (arXiv 2304.06767) or any weighting of
    examples."""
    return -advantages * logprobs, {}


@policy_loss("sft_is", metric="sft_is_loss", corrects_rollouts=False)
def sft_is(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """-sg(p) log pi, p the token's own probability: SFT as importance-weighted RL (DFT, arXiv 2508.05629)."""
    return -logprobs.detach().exp() * logprobs, {}


@policy_loss("sft_phi", metric="sft_phi_loss", corrects_rollouts=False)
def sft_phi(logprobs: Tensor, mask: Tensor, *, cutoff_prob: PositiveShare = 1.0) -> tuple[Tensor, Stats]:
    """-sg(p (1 - p)) log pi: near-certain and near-impossible tokens get little weight (CHORD-phi, arXiv 2508.11408).

    Tokens more probable than `cutoff_prob` get no gradient.
    """
    p = logprobs.detach().exp()
    held = logprobs.clamp(max=math.log(cutoff_prob)) if cutoff_prob < 1 else logprobs
    return -p * (1 - p) * held, {}


def _pairs(mask: Tensor) -> Tensor:
    """[B, T] bool, true at the first action token of each chosen row of a pair with two answers."""
    if mask.shape[0] % 2:
        raise InputError(
            f"DPO takes rows as chosen, rejected, chosen, rejected ...; {mask.shape[0]} is an odd number", key="mask"
        )
    whole = mask.any(-1).view(-1, 2).all(-1, keepdim=True)
    chosen = (whole & whole.new_tensor([True, False])).reshape(-1, 1)
    return first_token(mask) & chosen


def _pair_weights(mask: Tensor) -> Tensor:
    """1 / number of pairs at the token of each pair; pairs with an empty answer are excluded."""
    place = _pairs(mask)
    return place / place.sum().clamp(min=1)


@policy_loss("dpo", metric="dpo_loss", weigh=_pair_weights, corrects_rollouts=False, rows_per_unit=2)
def dpo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor,
    beta: Positive = 0.1,
    label_smoothing: Annotated[Number, Ge(0), Le(0.5)] = 0.0,
) -> tuple[Tensor, Stats]:
    """Per pair -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h = log pi/ref of the chosen answer minus that of
    the rejected one (DPO, arXiv 2305.18290, eq. 7; s = `label_smoothing`: conservative DPO).

    Log-probs are summed over an answer, the sigmoid is taken for each pair, and the loss is the mean over pairs. A
    pair's value is at the first action token of its chosen row; `loss_agg_mode` is not used.
    """
    place = _pairs(mask)
    chosen, rejected = (beta * row_sum(logprobs - ref_logprobs, mask)).view(-1, 2, 1).unbind(1)
    margin = chosen - rejected
    logsigmoid = torch.nn.functional.logsigmoid
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)

    def at_place(per_pair: Tensor) -> Tensor:
        return per_pair.repeat_interleave(2, dim=0) * place

    return at_place(loss), {
        "chosen_reward": (at_place(chosen.detach()), place),
        "rejected_reward": (at_place(rejected.detach()), place),
        "reward_margin": (at_place(margin.detach()), place),
        "accuracy_mean": (at_place((margin > 0).to(margin.dtype)), place),
    }


def mu_at(step: int, mu_warmup_steps: int, mu_decay_steps: int, mu_peak: float, mu_valley: float) -> float:
    """CHORD's weight of the expert (arXiv 2508.11408, section 3.1): linear to the peak, then a cosine to the valley."""
    if step < mu_warmup_steps:
        return mu_peak * step / mu_warmup_steps
    if step >= mu_warmup_steps + mu_decay_steps:
        return mu_valley
    progress = (step - mu_warmup_steps) / mu_decay_steps
    return mu_valley + (mu_peak - mu_valley) * (1 + math.cos(math.pi * progress)) / 2


def _split(mask: Tensor, is_expert: Tensor) -> tuple[Tensor, Tensor]:
    expert = is_expert[:, None].bool()
    return mask & ~expert, mask & expert


def _mix_weights(mask: Tensor, aggregate: Callable[[Tensor], Tensor], is_expert: Tensor, mu: float = 0.1) -> Tensor:
    usual, expert = _split(mask, is_expert)
    return (1 - mu) * aggregate(usual) + mu * aggregate(expert)


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
    return _mix_weights(mask, aggregate, is_expert, mu)


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
    mu: Share = 0.1,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: DualClip = 3.0,
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
    mu_peak: Share = 0.1,
    mu_valley: Share = 0.1,
    enable_phi_function: bool = True,
    cutoff_prob: Annotated[PositiveShare, ActsWith("enable_phi_function")] = 1.0,
    clip_range: NonNegative = 0.2,
    clip_range_low: NonNegative | None = None,
    clip_range_high: NonNegative | None = None,
    clip_ratio_c: DualClip = 3.0,
) -> tuple[Tensor, Stats]:
    """`mix` with CHORD's schedule of mu and its weight p (1 - p) on the expert's tokens (arXiv 2508.11408)."""
    clip = {"clip_range": clip_range, "clip_range_low": clip_range_low, "clip_range_high": clip_range_high}
    clip["clip_ratio_c"] = clip_ratio_c
    if enable_phi_function:
        expert_values, _ = sft_phi.function(logprobs, mask, cutoff_prob=cutoff_prob)
    else:
        expert_values, _ = sft.function(logprobs, mask)
    values, stats = _joined(logprobs, mask, is_expert, expert_values, advantages, old_logprobs, clip)
    mu = mu_at(step, mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)
    return values, stats | {"mu": (torch.full_like(values, mu), mask)}
