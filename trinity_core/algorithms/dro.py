"""DRO: the policy gradient with a quadratic leash to the policy that sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.losses.policy_loss import log_ratio_to, policy_loss
from trinity_core.algorithms.metric_accumulator import Stats
from trinity_core.config.algorithm_types import GRPO, NO_ENTROPY, NO_KL, OFF_POLICY, register_algorithm
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("dro", ratio_to_rollout=True)
def dro(
    logprobs: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    beta: NonNegative = 0.05,
) -> tuple[Tensor, Stats]:
    """-(A log pi - beta / 2 (log pi / mu)^2) of each token, mu the sampling policy (`old_logprobs`); the papers' ratio
    is that of the whole answer (DRO, arXiv 2405.19107; Kimi k1.5, 2501.12599, section 2.3.2)."""
    log_ratio = log_ratio_to(old_logprobs, logprobs)
    return -advantages * logprobs + beta / 2 * log_ratio.square(), {
        "log_ratio/square": (log_ratio.square(), mask),
        "ppo_kl": (-log_ratio, mask),
    }


register_algorithm(
    replace(
        GRPO,
        name="dro",
        advantage_fn="rec",  # the reward minus its group's mean, which stands for the value
        advantage_fn_args={},
        policy_loss_fn="dro",
        policy_loss_fn_args={"beta": 0.05},
        **NO_KL | NO_ENTROPY | OFF_POLICY,
    )
)
