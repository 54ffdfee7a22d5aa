"""Dynamic sampling: select groups that are not zero-variance groups, until they fill a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def groups_with_variance(
    rewards: Tensor, group_ids: GroupIds, std_threshold: float = 0.0, rollout_ids: GroupIds | None = None
) -> Tensor:
    """[B] bool: rows of groups whose rollouts' rewards have a sample deviation above `std_threshold`.

    With a threshold of 0 these are all but the zero-variance groups: the groups that DAPO's dynamic sampling keeps
    (arXiv 2503.14476, eq. 11). Groups of one are never kept.
    """
    groups = Groups.of(rewards, group_ids, rollout_ids)
    return (groups.stds > std_threshold)[groups.index]


def fill_batch(keep: Tensor, group_ids: GroupIds, rows: int) -> tuple[Tensor, bool]:
    """(indices of rows to train on, whether they are at least `rows`): whole kept groups in order of their first row.

    While kept groups do not fill the batch, DAPO samples more tasks.
    """
    groups = Groups.of(torch.zeros(len(keep), device=keep.device), group_ids)
    chosen: list[int] = []
    members: dict[int, list[int]] = {}
    for row, (group, kept) in enumerate(zip(groups.index.tolist(), keep.tolist(), strict=True)):
        if kept:
            members.setdefault(group, []).append(row)
    for group_rows in members.values():
        if len(chosen) >= rows:
            break
        chosen += group_rows
    return torch.tensor(chosen, dtype=torch.long), len(chosen) >= rows
