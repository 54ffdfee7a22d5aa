"""GDPO: each part of the reward is compared for itself, so that none drowns in another's scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.algorithms.tensors import divided
from trinity_core.config.algorithm_types import GRPO, register_algorithm
from trinity_core.config.types import NonNegative
from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@advantage("gdpo")
def gdpo(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    numbers: Sequence[Mapping[str, float]],
    weights: dict[str, float],
    rollout_ids: GroupIds | None = None,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """(S - mean S) / (deviation of S + epsilon) over the rollouts of the batch, with S the sum over the parts k of the
    reward of w_k (r_k - mean of its group) / (sample deviation + epsilon) (GDPO, arXiv 2601.05242, eq. 4 to 6).

    `weights` are the w_k by the names of the parts, which each row has in `numbers` [B]. Raises InputError where a row
    has no such number.
    """
    if not weights:
        raise InputError("gdpo's weights name the parts of the reward, as {accuracy: 1, format: 0.5}", key="weights")
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for name, weight in weights.items():
        if lacking := [row for row, named in enumerate(numbers) if name not in named]:
            known = ", ".join(sorted(numbers[lacking[0]])) or "none"
            raise InputError(f"row {lacking[0]} has no reward part '{name}'; its numbers: {known}", key="weights")
        part = rewards.new_tensor([named[name] for named in numbers], dtype=torch.float64)
        groups = Groups.of(part, group_ids, rollout_ids)
        total += weight * divided(groups.deviations, groups.stds[groups.index], epsilon)
    batch = Groups.of(total, [0] * len(total), groups.rollouts)
    whole = Groups.of(rewards, group_ids, rollout_ids)
    return to_tokens(divided(batch.deviations, batch.std, epsilon), mask), whole.metrics()


register_algorithm(replace(GRPO, name="gdpo", advantage_fn="gdpo", advantage_fn_args={"epsilon": 1e-6}))
