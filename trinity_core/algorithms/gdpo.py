"""GDPO: each part of the reward is compared for itself, so that none drowns in another's scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.algorithms.tensors import divided
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.config.algorithm_types import GRPO, register_algorithm
from trinity_core.config.types import NonNegative

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
    penalties: Tensor | None = None,
    epsilon: NonNegative = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """(S - mean S) / (deviation of S + epsilon) over the rollouts of the batch, with S the sum over the parts k of the
    reward of w_k (r_k - mean of its group) / (sample deviation + epsilon) (GDPO, arXiv 2601.05242, eq. 4 to 6).

    `weights` are the w_k by the names of the parts, which each rollout has in its rows' `numbers` [B]. `penalties` [B]
    (a KL penalty) are subtracted from S. Raises InputError where a rollout has no such number.
    """
    if not weights:
        raise InputError("gdpo's weights name the parts of the reward, as {accuracy: 1, format: 0.5}", key="weights")
    whole = Groups.of(rewards, group_ids, rollout_ids)
    total = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for name, weight in weights.items():
        part = total.new_tensor(_parts(name, numbers, whole.rollouts.tolist()))
        groups = Groups.of(part, group_ids, rollout_ids)
        total += weight * divided(groups.deviations, groups.stds[groups.index], epsilon)
    all_in_one = [0] * len(total)
    if penalties is not None:
        total -= Groups.of(penalties, all_in_one, whole.rollouts).deviations
    batch = Groups.of(total, all_in_one, whole.rollouts)
    # The mean of S over the batch is 0 but for rounding, which would move the groups whose parts are all equal off 0.
    return to_tokens(divided(batch.rewards, batch.std, epsilon), mask), whole.metrics()


def _parts(name: str, numbers: Sequence[Mapping[str, float]], rollouts: Sequence[int]) -> list[float]:
    """[B] the part of each row's rollout: the mean of its rows that have it, which may be the last turn alone."""
    by_rollout: dict[int, list[float]] = defaultdict(list)
    for rollout, parts in zip(rollouts, numbers, strict=True):
        by_rollout[rollout] += [parts[name]] if name in parts else []
    if lacking := [row for row, rollout in enumerate(rollouts) if not by_rollout[rollout]]:
        names = ", ".join(sorted(numbers[lacking[0]])) or "none"
        raise InputError(f"row {lacking[0]} has no reward part '{name}'; its numbers: {names}", key="weights")
    return [fmean(by_rollout[rollout]) for rollout in rollouts]


register_algorithm(replace(GRPO, name="gdpo", advantage_fn="gdpo", advantage_fn_args={"epsilon": 1e-6}))
