"""What is done to rewards and groups before advantages: the penalty for length, and which groups are worth a step."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_core.algorithms.advantages.base import GroupIds, Groups
from trinity_core.algorithms.registry import InputError


def overlong_penalty(lengths_B: Tensor, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """[B] DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13), to be added to the rewards.

    0 up to max_length - cache_length tokens, then falling linearly to -factor at max_length, and -factor beyond.
    """
    if not 0 < cache_length <= max_length:
        raise InputError(f"the overlong penalty needs 0 < cache_length <= max_length, not {cache_length}, {max_length}")
    excess = lengths_B.to(torch.float32) - (max_length - cache_length)
    return -factor * (excess / cache_length).clamp(0, 1)


def informative_groups(rewards: Tensor, group_ids: GroupIds, std_threshold: float = 0.0) -> Tensor:
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
