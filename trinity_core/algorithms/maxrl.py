"""MaxRL: rare successes weigh more, as in maximum likelihood."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.base.lazy import torch
from trinity_core.config.algorithm_types import GRPO, NO_KL, register_algorithm

if TYPE_CHECKING:
    from torch import Tensor


@advantage("maxrl")
def maxrl(
    rewards: Tensor, group_ids: GroupIds, mask: Tensor, rollout_ids: GroupIds | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(r - mean of its group) / mean, 0 in groups whose mean is not above 0 (MaxRL, arXiv 2602.02710, algorithm 1).

    For rewards that are not negative, 0 or 1 as a rule: with n rollouts the gradient is that of the likelihood's
    expansion to order n.
    """
    groups = Groups.of(rewards, group_ids, rollout_ids)
    means = groups.means[groups.index]
    scores = torch.where(means > 0, groups.deviations / means.clamp(min=torch.finfo(means.dtype).tiny), 0.0)
    return to_tokens(scores, mask), groups.metrics()


register_algorithm(replace(GRPO, name="maxrl", advantage_fn="maxrl", advantage_fn_args={}, **NO_KL))
