"""Credit for single turns of a run, where several runs pass through the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.errors import InputError
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Result: TypeAlias = "tuple[Tensor, dict[str, float]]"


@advantage("gigpo")
def gigpo(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    run_ids: GroupIds,
    turns: Tensor | None = None,
    states: Sequence[str] | None = None,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    epsilon: float = 1e-6,
    std_normalize: bool = True,
) -> Result:
    """A run's advantage in its group plus `step_weight` times a turn's among the turns that began in the same state
    (GiGPO, arXiv 2505.10978, sections 4.1 to 4.3).

    Rows are turns with rewards of their own, 0 for most. A run is compared by the sum of its rewards, a turn by its
    reward and the later ones, discounted by `gamma` a turn, with all turns of the group that have its state, of its own
    run too. Both are divided by their sample deviation plus epsilon, or not without `std_normalize`. A state that is ""
    or met once gives a turn no advantage of its own. `run_ids` [B] name the run within its group; `turns` [B] its order
    (by default that of the rows).
    """
    if states is not None and len(states) != len(rewards):
        raise InputError(f"there are {len(states)} states for {len(rewards)} rows")
    groups = Groups.of(rewards, group_ids)
    run_of = Groups.of(rewards, run_ids).index
    runs = Groups.of(rewards, groups.index * (int(run_of.max()) + 1 if len(run_of) else 1) + run_of)
    order = torch.arange(len(rewards), device=rewards.device) if turns is None else turns
    totals = torch.zeros_like(runs.counts, dtype=torch.float64).index_add_(0, runs.index, runs.rewards)
    episodes = Groups.of(totals[runs.index], groups.index, runs.index)
    rows = range(len(rewards))
    keys = [(int(groups.index[i]), states[i]) if states is not None and states[i] else i for i in rows]
    steps = Groups.of(discounted(runs.rewards, runs.index, order, gamma), keys)
    scores = _normal(episodes, epsilon, std_normalize) + step_weight * _normal(steps, epsilon, std_normalize)
    shared = (steps.counts[steps.index] > 1).double().mean() if len(rewards) else 0.0
    return to_tokens(scores, mask), episodes.metrics() | {"gigpo/shared_states": float(shared)}


def discounted(rewards: Tensor, runs: Tensor, turns: Tensor, gamma: float) -> Tensor:
    """[B] each row's reward and the later ones of its run, discounted by `gamma` for each row between.

    Raises InputError if two rows of a run have the same turn.
    """
    found = torch.zeros_like(rewards)
    for run in range(int(runs.max()) + 1 if len(runs) else 0):
        rows = (runs == run).nonzero()[:, 0]
        rows = rows[turns[rows].argsort(descending=True)]
        if len(torch.unique(turns[rows])) != len(rows):
            raise InputError("two rows of one run have the same turn; which of them is first?")
        later = torch.zeros((), dtype=rewards.dtype, device=rewards.device)
        for row in rows:
            later = rewards[row] + gamma * later
            found[row] = later
    return found


def _normal(groups: Groups, epsilon: float, std_normalize: bool) -> Tensor:
    return groups.deviations / (groups.stds[groups.index] + epsilon) if std_normalize else groups.deviations
