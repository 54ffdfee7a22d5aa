"""REINFORCE++ with the group's mean as baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.algorithms.tensors import as_mask, whiten
from trinity_core.config.algorithm_types import GRPO, register_algorithm

if TYPE_CHECKING:
    from torch import Tensor


@advantage("reinforceplusplus_baseline")
def reinforceplusplus_baseline(
    rewards: Tensor, group_ids: GroupIds, mask: Tensor, rollout_ids: GroupIds | None = None
) -> tuple[Tensor, dict[str, float]]:
    """r - mean of its group, whitened over all tokens of the batch (arXiv 2501.03262 v2, section 3.3): one scale for
    easy and hard tasks, where GRPO has one for each."""
    groups = Groups.of(rewards, group_ids, rollout_ids)
    return whiten(to_tokens(groups.deviations, mask), as_mask(mask)), groups.metrics()


register_algorithm(
    replace(GRPO, name="reinforceplusplus_baseline", advantage_fn="reinforceplusplus_baseline", advantage_fn_args={})
)
