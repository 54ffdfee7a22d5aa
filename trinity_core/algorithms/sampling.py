"""Dynamic sampling: which groups of rollouts are worth a step, and when there are enough of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups
from trinity_core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def groups_with_variance(rewards: Tensor, group_ids: GroupIds, std_threshold: float = 0.0) -> Tensor:
    """[B] bool: the rows of groups whose rewards deviate by more than `std_threshold` (sample deviation).

    What DAPO's dynamic sampling keeps (arXiv 2503.14476, eq. 11): with rewards of 0 and 1 and a threshold of 0, the
    groups that are neither all right nor all wrong. Groups of one are never kept.
    """
    groups = Groups.of(rewards, group_ids)
    return (groups.stds > std_threshold)[groups.index]


def fill_batch(keep: Tensor, group_ids: GroupIds, rows: int) -> tuple[Tensor, bool]:
    """(indices of rows to train on, whether they fill the batch): kept groups whole and in order of their first row,
    until there are at least `rows`. While they do not fill it, DAPO samples more tasks.
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
