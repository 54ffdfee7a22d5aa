"""Advantages per token or turn: GAE, discounted returns, distillation from a teacher, and GiGPO's credit for turns.

All take `group_ids`, as every advantage does; those per token ignore them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from trinity_core.algorithms.advantages.grouping import (
    GroupIds,
    Groups,
    advantage,
    require_finite_rewards,
    to_tokens,
    token_rewards_of,
)
from trinity_core.algorithms.tensors import (
    as_mask,
    clean,
    divided,
    masked_mean,
    require_finite,
    whiten,
    without_gradient,
)
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.signatures import ActsWith
from trinity_core.config.types import NonNegative, Share

if TYPE_CHECKING:
    from torch import Tensor


Result: TypeAlias = "tuple[Tensor, dict[str, float]]"


@advantage("none")
def none(
    mask: Tensor, rewards: Tensor | None = None, group_ids: GroupIds | None = None
) -> tuple[Tensor, dict[str, float]]:
    """0 everywhere, for losses that use no advantage."""
    return torch.zeros(mask.shape, device=mask.device), {}


@advantage("ppo")
@without_gradient
def gae(
    mask: Tensor,
    values: Tensor,
    token_rewards: Tensor | None = None,
    rewards: Tensor | None = None,
    group_ids: GroupIds | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> tuple[Tensor, dict[str, float], Tensor]:
    """(advantages, metrics, returns): generalised advantage estimation (arXiv 1506.02438, eq. 16), whitened.

    A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t over the action tokens; other
    tokens (tool output) are skipped; V is 0 after the last. Returns are A + V before whitening, the critic's target.
    """
    mask = as_mask(mask)
    require_finite(mask, values=values)
    rewards_BT = token_rewards_of(rewards, token_rewards, mask).double()
    values_BT = clean(values, mask).double()
    advantages = torch.zeros_like(values_BT)
    following, value = torch.zeros_like(values_BT[:, 0:1]), torch.zeros_like(values_BT[:, 0:1])
    for t in reversed(range(mask.shape[1])):
        here = slice(t, t + 1)
        estimate = rewards_BT[:, here] + gamma * value - values_BT[:, here] + gamma * lam * following
        following = torch.where(mask[:, here], estimate, following)
        value = torch.where(mask[:, here], values_BT[:, here], value)
        advantages[:, here] = clean(estimate, mask[:, here])
    returns = (advantages + values_BT).to(values.dtype)
    metrics = {
        "advantages/mean": float(masked_mean(advantages, mask)),
        "returns/mean": float(masked_mean(returns, mask)),
        "values/mean": float(masked_mean(values_BT, mask)),
    }
    result = whiten(advantages, mask) if whiten_advantages else advantages
    return result.to(values.dtype), metrics, returns


@advantage("reinforceplusplus")
@without_gradient
def reinforceplusplus(
    mask: Tensor,
    rewards: Tensor | None = None,
    token_rewards: Tensor | None = None,
    group_ids: GroupIds | None = None,
    gamma: float = 1.0,
) -> tuple[Tensor, dict[str, float]]:
    """Discounted returns G_t = r_t + gamma G_{t+1} over the action tokens, whitened over the whole batch
    (REINFORCE++, arXiv 2501.03262, section 3)."""
    mask = as_mask(mask)
    rewards_BT = token_rewards_of(rewards, token_rewards, mask).double()
    returns, total = torch.zeros_like(rewards_BT), torch.zeros_like(rewards_BT[:, 0:1])
    for t in reversed(range(mask.shape[1])):
        here = slice(t, t + 1)
        total = torch.where(mask[:, here], rewards_BT[:, here] + gamma * total, total)
        returns[:, here] = clean(total, mask[:, here])
    return whiten(returns, mask).float(), {"returns/mean": float(masked_mean(returns, mask))}


@advantage("reinforce")
def reinforce(
    rewards: Tensor, mask: Tensor, group_ids: GroupIds | None = None, baseline: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """r - baseline, a constant; uses neither groups nor a critic."""
    require_finite_rewards(rewards)
    return to_tokens(rewards.detach() - baseline, mask), {}


@advantage("on_policy_distill")
@without_gradient
def on_policy_distill(
    mask: Tensor,
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    rewards: Tensor | None = None,
    group_ids: GroupIds | None = None,
    kl_coef: NonNegative = 1.0,
) -> tuple[Tensor, dict[str, float]]:
    """kl_coef * (log teacher - log student) of each sampled token: its expectation is minus the reverse KL (Agarwal et
    al., arXiv 2306.13649; Thinking Machines Lab 2025, "On-policy distillation").

    `old_logprobs` are the student's, `teacher_logprobs` the teacher's log-probs of the same tokens, [B, T]. `kl/mean`
    and `kl/std` are of the sums of rows with action tokens, `kl/token` is the mean over tokens.
    """
    mask = as_mask(mask)
    require_finite(mask, teacher_logprobs=teacher_logprobs, old_logprobs=old_logprobs)
    gap = clean(teacher_logprobs - old_logprobs, mask)
    rows = -gap.sum(-1)[mask.any(-1)]
    if not len(rows):
        return kl_coef * gap, {}
    return kl_coef * gap, {
        "kl/mean": float(rows.mean()),
        "kl/std": float(rows.std()) if len(rows) > 1 else 0.0,
        "kl/token": float(masked_mean(-gap, mask)),
    }


@advantage("jsd")
@without_gradient
def jsd(
    mask: Tensor,
    teacher_logprobs: Tensor,
    old_logprobs: Tensor,
    rewards: Tensor | None = None,
    group_ids: GroupIds | None = None,
    kl_coef: NonNegative = 1.0,
    lambda_coef: Share = 0.5,
) -> tuple[Tensor, dict[str, float]]:
    """kl_coef * (1 - l) * log(m / q), m = l p + (1 - l) q, l = `lambda_coef`: minus the score-function gradient of the
    generalised Jensen-Shannon divergence l KL(p, m) + (1 - l) KL(q, m) (Agarwal et al., arXiv 2306.13649, section 3).

    p is the teacher's probability of the token, q the student's (`teacher_logprobs`, `old_logprobs` [B, T]). The
    derivative of the divergence by the q of a token is (1 - l) log(q / m): the terms from m sum to -(1 - l) and cancel
    the 1 of d(q log q). The value is at least (1 - l) log(1 - l), however unlikely the token is for the teacher, and 0
    for l = 0 or 1. The metric is the divergence estimated from the sampled tokens.
    """
    mask = as_mask(mask)
    require_finite(mask, teacher_logprobs=teacher_logprobs, old_logprobs=old_logprobs)
    teacher, student = clean(teacher_logprobs, mask), clean(old_logprobs, mask)
    shares = torch.tensor([lambda_coef, 1 - lambda_coef], dtype=teacher.dtype, device=teacher.device)
    mixed = torch.logaddexp(teacher + shares[0].log(), student + shares[1].log())
    ahead = clean(student - mixed, mask)
    ratio = (teacher - student).double().exp()
    divergence = clean(shares[0] * ratio * (teacher - mixed) + shares[1] * ahead, mask)
    return -kl_coef * shares[1] * ahead, {"jsd/token": float(masked_mean(divergence, mask))}


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
    epsilon: Annotated[NonNegative, ActsWith("std_normalize")] = 1e-6,
    std_normalize: bool = True,
) -> Result:
    """A run's advantage within its group plus `step_weight` times that of a turn among turns that began in the same
    state (GiGPO, arXiv 2505.10978, sections 4.1 to 4.3).

    Rows are turns with their own rewards, 0 for most. Runs are compared by the sum of their rewards. A turn's return
    (its reward and the later ones, discounted by `gamma` a turn) is compared with all turns of the group in the same
    state, its own run's included. Both are divided by their sample deviation plus epsilon if `std_normalize`. Turns
    whose state is "" or occurs once get no advantage of their own. `run_ids` [B] name the run within its group; `turns`
    [B] give its order (by default the order in the batch).
    """
    if states is not None and len(states) != len(rewards):
        raise InputError(f"there are {len(states)} states for {len(rewards)} rows", key="states")
    groups = Groups.of(rewards, group_ids)
    run_of = Groups.of(rewards, run_ids).index
    runs = Groups.of(rewards, groups.index * (int(run_of.max()) + 1 if len(run_of) else 1) + run_of)
    order = torch.arange(len(rewards), device=rewards.device) if turns is None else turns
    exact = rewards.detach().double()
    totals = torch.zeros_like(runs.counts, dtype=torch.float64).index_add_(0, runs.index, exact)
    episodes = Groups.of(totals[runs.index], groups.index, runs.index)
    rows = range(len(rewards))
    keys = [(int(groups.index[i]), states[i]) if states is not None and states[i] else i for i in rows]
    steps = Groups.of(discounted(exact, runs.index, order, gamma), keys)
    scores = _normal(episodes, epsilon, std_normalize) + step_weight * _normal(steps, epsilon, std_normalize)
    shared = (steps.counts[steps.index] > 1).double().mean() if len(rewards) else 0.0
    return to_tokens(scores, mask), episodes.metrics() | {"gigpo/shared_states": float(shared)}


def discounted(rewards: Tensor, runs: Tensor, turns: Tensor, gamma: float) -> Tensor:
    """[B] each row's reward plus the later ones of its run, discounted by `gamma` for each row in between.

    Raises InputError if two rows of a run have the same turn.
    """
    returns = torch.zeros_like(rewards)
    for run in range(int(runs.max()) + 1 if len(runs) else 0):
        rows = (runs == run).nonzero()[:, 0]
        rows = rows[turns[rows].argsort(descending=True)]
        if len(torch.unique(turns[rows])) != len(rows):
            raise InputError("two rows of one run have the same turn; which of them is first?", key="turns")
        later = torch.zeros((), dtype=rewards.dtype, device=rewards.device)
        for row in rows:
            later = rewards[row] + gamma * later
            returns[row] = later
    return returns


def _normal(groups: Groups, epsilon: float, std_normalize: bool) -> Tensor:
    return divided(groups.deviations, groups.stds[groups.index], epsilon) if std_normalize else groups.deviations
