"""ReMax: the reward of the greedy answer as baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.base.errors import InputError
from trinity_core.config.algorithm_types import GRPO, register_algorithm

if TYPE_CHECKING:
    from torch import Tensor

BASELINE = "greedy_reward"


@advantage("remax")
def remax(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    numbers: Sequence[Mapping[str, float]],
    rollout_ids: GroupIds | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """r minus the reward of the task's greedy answer (ReMax, arXiv 2310.10505, algorithm 1), which is `greedy_reward`
    in the row's `numbers`. Raises InputError for a row without it."""
    if lacking := [row for row, parts in enumerate(numbers) if BASELINE not in parts]:
        raise InputError(
            f"row {lacking[0]} has no {BASELINE}: remax needs the workflow greedy_baseline_workflow, or one that sets "
            "this metric",
            key="default_workflow_type",
        )
    groups = Groups.of(rewards, group_ids, rollout_ids)
    baselines = groups.rewards.new_tensor([parts[BASELINE] for parts in numbers])
    return to_tokens(groups.rewards - baselines, mask), groups.metrics() | {"remax/baseline": float(baselines.mean())}


register_algorithm(
    replace(GRPO, name="remax", advantage_fn="remax", advantage_fn_args={}, min_repeat_times=1, default_repeat_times=1)
)
