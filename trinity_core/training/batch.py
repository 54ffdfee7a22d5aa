"""A whole training batch as tensors. Every rank holds the same one, so ranks agree on advantages and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity_core.data.experience import Experience
from trinity_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows. Response token t of a row is in column t of [B, T]; tokens that are no actions are masked out."""

    experiences: list[Experience]
    mask: Tensor
    """bool [B, T]: action tokens."""
    rollout_logprobs: Tensor | None
    """float32 [B, T], 0 in rows without log-probs (expert data); None if no row has any."""
    rewards: Tensor
    """float32 [B]; 0 for a row without a reward."""
    token_rewards: Tensor | None
    """float32 [B, T], without the sequence's reward; None if no row has any."""
    teacher_logprobs: Tensor | None
    """float32 [B, T]; None if no row has any."""
    is_expert: Tensor
    """bool [B]."""

    def __len__(self) -> int:
        return len(self.experiences)

    @property
    def width(self) -> int:
        """T."""
        return self.mask.shape[1]

    @property
    def excluded(self) -> Tensor:
        """bool [B]: expert rows and unscored answers, which take no part in advantages."""
        return torch.tensor([e.is_expert or e.is_unscored for e in self.experiences], device=self.mask.device)

    @property
    def groups(self) -> list[str]:
        """The group of each row."""
        return [e.group for e in self.experiences]


def make_batch(experiences: Sequence[Experience], device: torch.device) -> Batch:
    """The batch of these rows, in this order. Raises DataError for no rows.

    A row may have no token that carries loss: its answer is unscored, or its prompt was cut.
    """
    if not experiences:
        raise DataError("a training batch has no rows")
    width = max(e.response_length for e in experiences)
    return Batch(
        list(experiences),
        _grid([e.action_mask for e in experiences], width, np.bool_).to(device),
        _optional([e.logprobs for e in experiences], width, device),
        torch.tensor([e.reward or 0.0 for e in experiences], device=device),
        _optional([e.token_rewards for e in experiences], width, device),
        _optional([e.teacher_logprobs for e in experiences], width, device),
        torch.tensor([e.is_expert for e in experiences], device=device),
    )


def _grid(rows: Sequence[np.ndarray | None], width: int, dtype: type) -> Tensor:
    grid: np.ndarray = np.zeros((len(rows), width), dtype=dtype)
    for i, row in enumerate(rows):
        if row is not None:
            grid[i, : len(row)] = row
    return torch.from_numpy(grid)


def _optional(rows: Sequence[np.ndarray | None], width: int, device: torch.device) -> Tensor | None:
    return None if all(row is None for row in rows) else _grid(rows, width, np.float32).to(device)


def batch_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Metrics of a batch as it was drawn: lengths, rewards, and the staleness of its tokens in train steps."""
    rows = batch.experiences
    lengths = np.array([e.response_length for e in rows])
    metrics = {
        "experience/rows": float(len(rows)),
        "experience/groups": float(len(set(batch.groups))),
        "experience/tokens": float(sum(len(e.tokens) for e in rows)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean([e.truncated for e in rows])),
        "prompt_length/mean": float(np.mean([e.prompt_length for e in rows])),
    }
    rewards = [e.reward for e in rows if e.reward is not None]
    if rewards:
        metrics |= {
            "reward/mean": float(np.mean(rewards)),
            "reward/max": float(np.max(rewards)),
            "reward/min": float(np.min(rewards)),
        }
    sampled = [e.versions[e.versions >= 0] for e in rows if e.newest_version >= 0 and e.versions is not None]
    if sampled:
        lag = version - np.concatenate(sampled)
        metrics |= {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}
    if experts := sum(e.is_expert for e in rows):
        metrics["experience/expert_rows"] = float(experts)
    return metrics
