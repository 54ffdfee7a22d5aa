"""A whole training batch as tensors: the same on every rank, so that all ranks agree on advantages and weights."""

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
    """B rows; response token t of each stands in column t of [B, T], and what is no action counts as absent."""

    experiences: list[Experience]
    mask: Tensor
    """bool [B, T]: action tokens."""
    rollout_logprobs: Tensor | None
    """float32 [B, T]; None where no row has any. 0 in rows without (expert data)."""
    rewards: Tensor
    """float32 [B]; 0 where a row has none."""
    token_rewards: Tensor | None
    """float32 [B, T]; None where no row has any. The sequence's reward is not among them."""
    teacher_logprobs: Tensor | None
    """float32 [B, T]; None where no row has any."""
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
        """bool [B]: rows that rewards are not compared with: an expert's, and answers without a verdict."""
        return torch.tensor([e.is_expert or e.is_unscored for e in self.experiences], device=self.mask.device)

    @property
    def groups(self) -> list[str]:
        """The group of each row."""
        return [e.group for e in self.experiences]


def make_batch(experiences: Sequence[Experience], device: torch.device) -> Batch:
    """Lay out rows in the order given. Raises DataError for an empty batch.

    A row may have no token that carries loss: a verifier gave no verdict, or its prompt was cut.
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
    """What came in: lengths, rewards, and how old the policies are that sampled it (in trainer steps)."""
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
    versions = [e.newest_version for e in rows if e.newest_version >= 0]
    if versions:
        lag = version - np.array(versions)
        metrics |= {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}
    if experts := sum(e.is_expert for e in rows):
        metrics["experience/expert_rows"] = float(experts)
    return metrics
