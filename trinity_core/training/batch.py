"""A whole training batch as tensors. Every rank holds the same one, so ranks agree on its micro-batches and weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity_core.base.errors import DataError, InputError
from trinity_core.data.experience import Experience, rollout_rewards, rollouts_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows. Response token t of a row is in column t of [B, T]; tokens that are not actions are masked out."""

    experiences: list[Experience]
    mask: Tensor
    """bool [B, T]: action tokens."""
    rollout_logprobs: Tensor | None
    """float32 [B, T], valid where `has_rollout_logprobs`; None if no row has any."""
    has_rollout_logprobs: Tensor
    rewards: Tensor
    """float64 [B]: `total_reward`, valid in rows that are not `excluded`."""
    token_rewards: Tensor | None
    """float32 [B, T], without the sequence's reward; 0 in rows without any, None if no row has any."""
    teacher_logprobs: Tensor | None
    """float32 [B, T], valid in rows that are not `excluded`; None if no row has any."""
    is_expert: Tensor

    def __len__(self) -> int:
        return len(self.experiences)

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    @property
    def excluded(self) -> Tensor:
        """bool [B]: expert rows, unscored answers and truncated prompts; excluded from advantages."""
        sampled_groups = _sampled_groups(self.experiences)
        out = [e.is_expert or e.is_unscored or e.group not in sampled_groups for e in self.experiences]
        return torch.tensor(out, device=self.mask.device)

    @property
    def groups(self) -> list[str]:
        return [e.group for e in self.experiences]


def make_batch(experiences: Sequence[Experience], device: torch.device, needs: Collection[str] = ()) -> Batch:
    """Return the batch of these rows, in this order.

    A row may have no loss-carrying token: unscored answers and truncated prompts. A rollout without one of `needs`
    (`Objective.needs_of_rows`) is masked too, with a warning. Raises DataError for no rows, and InputError if all
    rollouts lack one, or for a rollout log-prob of an action token that is not finite.
    """
    if not experiences:
        raise DataError("a training batch has no rows")
    rows = _with_unscored(experiences, needs)
    _require_finite_logprobs(rows)
    width = max(e.response_length for e in rows)
    taught = [e.teacher_logprobs for e in rows]
    return Batch(
        rows,
        _grid([e.action_mask for e in rows], width, np.bool_).to(device),
        _optional([e.logprobs for e in rows], width, device),
        torch.tensor([e.logprobs is not None for e in rows], device=device),
        torch.tensor([e.total_reward or 0.0 for e in rows], dtype=torch.float64, device=device),
        _optional([e.token_rewards for e in rows], width, device),
        _grid(taught, width, np.float32).to(device)
        if "teacher_logprobs" in needs  # also where no row has any: then none is in the loss
        else _optional(taught, width, device),
        torch.tensor([e.is_expert for e in rows], device=device),
    )


def _require_finite_logprobs(rows: Sequence[Experience]) -> None:
    for i, row in enumerate(rows):
        if row.logprobs is None:
            continue
        bad = ~np.isfinite(row.logprobs) & row.action_mask
        if bad.any():
            token = int(bad.argmax())
            raise InputError(
                f"the rollout log-prob of row {i} (run {row.run} of group '{row.group}'), token {token}, is "
                f"{row.logprobs[token]}",
                key="rollout_logprobs",
            )


def _with_unscored(experiences: Sequence[Experience], needs: Collection[str]) -> list[Experience]:
    """Mark rows that lack one of `needs` as unscored, so that a missing value is never read as 0."""
    rollouts = [e for e in experiences if not e.is_expert and e.action_mask.any()]
    lacking = {id(e): absent for e in rollouts if (absent := [name for name in needs if _lacks(e, name)])}
    if not lacking:
        return list(experiences)
    first = next(e for e in rollouts if id(e) in lacking)
    message = (
        f"{len(lacking)} of {len(rollouts)} rollouts have no {lacking[id(first)][0]}, which the algorithm needs; the "
        f"first is run {first.run} of group '{first.group}' ({first.info.get('taskset', 'no task set')})"
    )
    if len(lacking) == len(rollouts):
        raise InputError(f"{message}. Choose a workflow that gives it, or another algorithm.algorithm_type")
    log.warning("%s. They are left out of the loss, as answers that no verifier judged", message)
    return [_unscored(e) if id(e) in lacking else e for e in experiences]


def _lacks(row: Experience, name: str) -> bool:
    if name == "reward":
        return row.total_reward is None
    return getattr(row, name) is None


def _unscored(row: Experience) -> Experience:
    return replace(
        row, reward=None, token_rewards=None, teacher_logprobs=None, action_mask=np.zeros_like(row.action_mask)
    )


def _grid(rows: Sequence[np.ndarray | None], width: int, dtype: type) -> Tensor:
    grid: np.ndarray = np.zeros((len(rows), width), dtype=dtype)
    for i, row in enumerate(rows):
        if row is not None:
            grid[i, : len(row)] = row
    return torch.from_numpy(grid)


def _optional(rows: Sequence[np.ndarray | None], width: int, device: torch.device) -> Tensor | None:
    return None if all(row is None for row in rows) else _grid(rows, width, np.float32).to(device)


def _sampled_groups(experiences: Sequence[Experience]) -> set[str]:
    """Return the groups with at least one sampled rollout."""
    return {e.group for e in experiences if not e.is_unsampled}


def batch_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Metrics of a batch as drawn: lengths, rewards, and the staleness of its tokens in train steps.

    The reward of a rollout with several rows is their mean, as in the explorer's metrics. Lengths are those of
    rollouts, or of expert rows if there are no rollouts.
    """
    rows = batch.experiences
    rollouts = [e for e in rows if not e.is_expert]
    written = rollouts or rows
    lengths = np.array([e.response_length for e in written])
    metrics = {
        "experience/rows": float(len(rows)),
        "experience/groups": float(len(set(batch.groups))),
        "experience/tokens": float(sum(len(e.tokens) for e in rows)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated": float(np.mean([e.truncated for e in written])),
        "prompt_length/mean": float(np.mean([e.prompt_length for e in written])),
    }
    groups = _sampled_groups(rollouts)
    scored = [e for e in rollouts if e.group in groups]
    keys = zip((e.group for e in scored), rollouts_of(scored), strict=True)
    reward_of = dict(zip(keys, rollout_rewards(scored), strict=True))
    rewards = [reward for reward in reward_of.values() if reward is not None]
    if rewards:
        metrics |= {
            "experience/rollouts": float(len(reward_of)),
            "reward/mean": float(np.mean(rewards)),
            "reward/max": float(np.max(rewards)),
            "reward/min": float(np.min(rewards)),
        }
    sampled = [e.versions[e.versions >= 0] for e in rows if e.newest_version >= 0 and e.versions is not None]
    if sampled:
        lag = version - np.concatenate(sampled)
        metrics |= {"staleness/mean": float(lag.mean()), "staleness/max": float(lag.max())}
    unscored = sum(e.is_unscored for e in rows)
    without = sum(e.logprobs is None and not e.is_expert and not e.is_unscored for e in rows)
    metrics |= {"experience/unscored_rows": float(unscored)} if unscored else {}
    metrics |= {"experience/rows_without_logprobs": float(without)} if without else {}
    if experts := sum(e.is_expert for e in rows):
        metrics["experience/expert_rows"] = float(experts)
    return metrics
