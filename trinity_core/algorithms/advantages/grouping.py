"""Shared by advantage functions: groups of rollouts, token rewards, and the selection of groups for a batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from trinity_core.algorithms.tensors import as_mask, clean, last_token, require_finite
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


AdvantageFn = Callable[..., Any]
ADVANTAGES: Registry[AdvantageFn] = Registry(
    "advantage",
    inputs=(
        "mask", "rewards", "group_ids", "rollout_ids", "run_ids", "turns", "states", "token_rewards", "values",
        "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "entropies", "expected_signals",
        "lengths", "penalties", "numbers",
    ),
)  # fmt: skip
"""Name -> (rewards=[B], group_ids=[B], mask=[B, T], ...) -> (advantages [B, T], metrics), without gradient."""

GroupIds: TypeAlias = "Tensor | Sequence[Hashable]"


def advantage(name: str) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: register a function as `ADVANTAGES[name]`."""
    return ADVANTAGES.register(name)


def require_finite_rewards(rewards_B: Tensor) -> None:
    """Raise InputError for a reward that is not finite."""
    if not bool(torch.isfinite(rewards_B).all()):
        row = int((~torch.isfinite(rewards_B)).nonzero()[0])
        raise InputError(f"the reward of row {row} is {float(rewards_B[row])}", key="rewards")


@dataclass(frozen=True)
class Groups:
    """Rewards by group, in float64.

    A rollout is one sample of its group, however many rows it has: its reward is the mean of theirs, rounded to float32
    so that the order of summation does not matter, and each row weighs 1 / rows. Means are computed on differences to
    the smallest reward, so the deviation of equal rewards is exactly 0.
    """

    rewards: Tensor
    """[B] the reward of each row's rollout."""
    index: Tensor
    """[B] the group of each row, 0 <= g < G."""
    rollouts: Tensor
    """[B] the rollout of each row, 0 <= r < R."""
    counts: Tensor
    """[G] rollouts of each group."""
    weights: Tensor
    """[B] 1 / rows of the row's rollout."""

    @classmethod
    def of(cls, rewards: Tensor, group_ids: GroupIds | None, rollout_ids: GroupIds | None = None) -> Groups:
        """Group the rewards [B] of rows. `rollout_ids` [B] name the rollouts of a group; by default each row is one.

        Raises InputError for a reward that is not finite, or if the numbers of ids and rewards differ.
        """
        if rewards.dim() != 1 or group_ids is None or len(group_ids) != len(rewards):
            count = "none" if group_ids is None else len(group_ids)
            raise InputError(
                f"group advantages need rewards [B] and as many group_ids: {tuple(rewards.shape)}, {count}",
                key="group_ids",
            )
        require_finite_rewards(rewards)
        index = _numbered(group_ids, rewards.device)
        rollouts = torch.arange(len(rewards), device=rewards.device)
        if rollout_ids is not None:
            pairs = torch.stack([index, _numbered(rollout_ids, rewards.device)], dim=1)
            rollouts = torch.unique(pairs, dim=0, return_inverse=True)[1]
        weights = 1.0 / torch.bincount(rollouts)[rollouts].double()
        counts = torch.bincount(index, weights).round().long()
        means = _rollout_means(rewards.detach().double(), rollouts).float().double()
        return cls(means, index, rollouts, counts, weights)

    def sums(self, values_B: Tensor) -> Tensor:
        """[G] sums over each group's rollouts of the means of their rows' values."""
        return torch.zeros_like(self.counts, dtype=torch.float64).index_add_(0, self.index, values_B * self.weights)

    def extreme(self, values_B: Tensor, reduce: str) -> Tensor:
        """[G] `amin` or `amax` of each group's values."""
        start = torch.zeros_like(self.counts, dtype=torch.float64)
        return start.scatter_reduce(0, self.index, values_B, reduce, include_self=False)

    @property
    def deviations(self) -> Tensor:
        """[B] the rollout's reward minus its group's mean; 0 in groups of one."""
        shifted = self.rewards - self.extreme(self.rewards, "amin")[self.index]
        return shifted - (self.sums(shifted) / self.counts)[self.index]

    def losers(self) -> tuple[Tensor, Tensor]:
        """[R] bool: rollouts below their group's mean; [R] the group of each rollout."""
        among = torch.zeros(int(self.rollouts.max()) + 1 if len(self.rollouts) else 0, device=self.index.device)
        means = among.double().index_add_(0, self.rollouts, self.deviations * self.weights)
        return means < 0, among.long().scatter_(0, self.rollouts, self.index)

    @property
    def means(self) -> Tensor:
        """[G]"""
        return self.sums(self.rewards) / self.counts

    @property
    def stds(self) -> Tensor:
        """[G] sample deviation (n - 1); 0 for groups of one."""
        return (self.sums(self.deviations.square()) / (self.counts - 1).clamp(min=1)).sqrt()

    @property
    def std(self) -> Tensor:
        """Sample deviation of the rewards of all groups' rollouts; 0 for a single one."""
        count = self.counts.sum()
        mean = (self.rewards * self.weights).sum() / count
        return (((self.rewards - mean).square() * self.weights).sum() / (count - 1).clamp(min=1)).sqrt()

    @property
    def std_of_deviations(self) -> Tensor:
        """Sample deviation of `deviations` over the rollouts of all groups but zero-variance ones."""
        count = self.counts[self.stds > 0].sum()
        return ((self.deviations.square() * self.weights).sum() / (count - 1).clamp(min=1)).sqrt()

    def metrics(self) -> dict[str, float]:
        """Mean and deviation of the rewards, averaged over groups, and the fraction of zero-variance groups."""
        if not len(self.rewards):
            return {}
        return {
            "group_advantages/reward_mean": float(self.means.mean()),
            "group_advantages/reward_std": float(self.stds.mean()),
            "group_advantages/zero_variance_groups": float((self.stds == 0).double().mean()),
        }


def _rollout_means(rewards_B: Tensor, rollouts: Tensor) -> Tensor:
    """[B] mean reward of each row's rollout."""
    rows = torch.bincount(rollouts)
    least = torch.full((len(rows),), torch.inf, dtype=rewards_B.dtype, device=rewards_B.device)
    least = least.scatter_reduce(0, rollouts, rewards_B, "amin")
    above = torch.zeros_like(least).index_add_(0, rollouts, rewards_B - least[rollouts])
    return (least + above / rows)[rollouts]


def _numbered(ids: GroupIds, device: torch.device) -> Tensor:
    if isinstance(ids, torch.Tensor):
        return torch.unique(ids.to(device), return_inverse=True)[1]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(ids))}
    return torch.tensor([numbers[name] for name in ids], dtype=torch.long, device=device)


def to_tokens(scores_B: Tensor, mask: Tensor) -> Tensor:
    """[B, T] each row's score at all its action tokens, float32."""
    mask = as_mask(mask)
    if mask.shape[0] != len(scores_B):
        raise InputError(f"the mask has {mask.shape[0]} rows, but there are {len(scores_B)} rewards", key="mask")
    return clean(scores_B[:, None].to(torch.float32).expand(mask.shape), mask)


def at_last_token(rewards_B: Tensor, mask: Tensor) -> Tensor:
    """[B, T] each row's reward at its last action token; 0 in a row without action tokens."""
    return clean(rewards_B[:, None].expand(mask.shape), last_token(mask))


def token_rewards_of(rewards: Tensor | None, token_rewards: Tensor | None, mask: Tensor) -> Tensor:
    """[B, T] the token rewards, or the sequence's reward at its last action token if there are none.

    Raises InputError if neither is given, or one at an action token is not finite.
    """
    if token_rewards is None:
        if rewards is None:
            raise InputError("this advantage needs token_rewards [B, T] or rewards [B]", key="token_rewards")
        token_rewards = at_last_token(rewards, mask)
    require_finite(mask, token_rewards=token_rewards)
    return clean(token_rewards, mask)


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
    """Return the indices of rows to train on, whole kept groups by first row, and whether there are at least `rows`.

    If kept groups do not fill the batch, DAPO samples more tasks.
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
