"""DPPO: a trust region on probabilities in place of PPO's clip on their ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from trinity_core.algorithms.losses.policy_loss import log_ratio_to, policy_loss
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.base.lazy import torch
from trinity_core.config.algorithm_types import GRPO, NO_KL, OFF_POLICY, register_algorithm
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("dppo", ratio_to_rollout=True, scales_with_advantages=True)
def dppo(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    divergence: Literal["tv", "kl"] = "tv",
    delta_low: NonNegative = 0.2,
    delta_high: NonNegative = 0.2,
) -> tuple[Tensor, Stats]:
    """-A r, and 0 for a token whose divergence exceeds delta and whose update would increase it (DPPO, arXiv
    2602.04879, eq. 12 to 14).

    r = pi / mu, mu the sampling policy (`old_logprobs`). The divergence is that of the sampled token against all
    others: `tv` |pi - mu|, `kl` mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)). Where A > 0, `delta_high` bounds
    a pi above mu; where A < 0, `delta_low` one below.
    """
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    now, before = logprobs.detach().double(), (logprobs if old_logprobs is None else old_logprobs).detach().double()
    distance = (now.exp() - before.exp()).abs()
    if divergence == "kl":
        distance = before.exp() * (before - now) + (1 - before.exp()) * (_log_rest(before) - _log_rest(now))
    leaves = ((advantages > 0) & (now > before) & (distance > delta_high)) | (
        (advantages < 0) & (now < before) & (distance > delta_low)
    )
    values = torch.where(leaves, 0.0, -advantages * log_ratio.exp())
    return values, {"pg_clipfrac": (leaves, mask), "divergence": (distance, mask), "ppo_kl": (-log_ratio, mask)}


def _log_rest(logprobs: Tensor) -> Tensor:
    """log(1 - p), at least that of the smallest double above 0, so that p = 1 gives no infinity times 0."""
    return torch.log(-torch.expm1(logprobs).clamp(max=-torch.finfo(logprobs.dtype).tiny))


register_algorithm(
    replace(
        GRPO,
        name="dppo",
        policy_loss_fn="dppo",
        policy_loss_fn_args={"divergence": "tv", "delta_low": 0.2, "delta_high": 0.2},
        **NO_KL | OFF_POLICY,
    )
)
