"""Losses on given answers: SFT, its weighted forms, and DPO on pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trinity_core.algorithms.losses.policy_loss import policy_loss
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.algorithms.tensors import first_token, row_sum
from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("sft", metric="sft_loss", corrects_rollouts=False)
def sft(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """-log pi: the cross-entropy of the given tokens."""
    return -logprobs, {}


@policy_loss("sft_weighted", metric="sft_loss", corrects_rollouts=False)
def sft_weighted(logprobs: Tensor, mask: Tensor, *, advantages: Tensor) -> tuple[Tensor, Stats]:
    """-w log pi, w given as `advantages`: RAFT's choice of rows (arXiv 2304.06767) or any weighting of examples."""
    return -advantages * logprobs, {}


@policy_loss("sft_is", metric="sft_is_loss", corrects_rollouts=False)
def sft_is(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """-sg(p) log pi, p the token's own probability: SFT as importance-weighted RL (DFT, arXiv 2508.05629)."""
    return -logprobs.detach().exp() * logprobs, {}


@policy_loss("sft_phi", metric="sft_phi_loss", corrects_rollouts=False)
def sft_phi(logprobs: Tensor, mask: Tensor, *, cutoff_prob: float = 1.0) -> tuple[Tensor, Stats]:
    """-sg(p (1 - p)) log pi: near-certain and near-impossible tokens get little weight (CHORD-phi, arXiv 2508.11408).

    Tokens more probable than `cutoff_prob` get no gradient.
    """
    if not 0 < cutoff_prob <= 1:
        raise InputError(f"cutoff_prob is a probability above 0, not {cutoff_prob}")
    p = logprobs.detach().exp()
    held = logprobs.clamp(max=math.log(cutoff_prob)) if cutoff_prob < 1 else logprobs
    return -p * (1 - p) * held, {}


def _pairs(mask: Tensor) -> Tensor:
    """[B, T] bool, true at the first action token of each chosen row whose pair has two answers."""
    if mask.shape[0] % 2:
        raise InputError(f"DPO takes rows as chosen, rejected, chosen, rejected ...; {mask.shape[0]} is an odd number")
    whole = mask.any(-1).view(-1, 2).all(-1, keepdim=True)
    chosen = (whole & whole.new_tensor([True, False])).reshape(-1, 1)
    return first_token(mask) & chosen


def _pair_weights(mask: Tensor) -> Tensor:
    """1 / pairs at the place of each pair; pairs with an empty answer are excluded."""
    place = _pairs(mask)
    return place / place.sum().clamp(min=1)


@policy_loss("dpo", metric="dpo_loss", weigh=_pair_weights, corrects_rollouts=False, rows_per_unit=2)
def dpo(
    logprobs: Tensor, mask: Tensor, *, ref_logprobs: Tensor, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Tensor, Stats]:
    """Per pair -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h = (log pi/ref of the chosen answer) - (of the
    rejected one) (DPO, arXiv 2305.18290, eq. 7; s = `label_smoothing`: conservative DPO).

    Log-probs are summed over one answer, the sigmoid is taken pair by pair, the loss is the mean over pairs. A pair's
    value stands at the first action token of its chosen row; `loss_agg_mode` is not used.
    """
    if beta <= 0 or not 0 <= label_smoothing <= 0.5:
        raise InputError(f"DPO needs beta > 0 and 0 <= label_smoothing <= 0.5, not {beta} and {label_smoothing}")
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
