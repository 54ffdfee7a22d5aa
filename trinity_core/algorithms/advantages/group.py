"""Advantages relative to the other rollouts of the same task; no critic is needed.

A rollout with several rows (turns of a workflow, sequences of a session) is one sample of its group. Its reward r is
the mean of its rows' rewards, and each row gets the rollout's advantage. For credit by turn see `gigpo`.

M2PO and Clip_B leave out tokens that would move the policy too far.
Such a token gets an advantage of 0: it adds nothing to the loss, but still counts when the loss is averaged. The tokens
are selected once for the whole batch, before its first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from trinity_core.algorithms.advantages.grouping import GroupIds, Groups, advantage, to_tokens
from trinity_core.algorithms.tensors import as_mask, clean, divided, require_finite, without_gradient
from trinity_core.base.errors import InputError
from trinity_core.base.lazy import torch
from trinity_core.base.signatures import ActsWith, ArgumentsOf
from trinity_core.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor


Result: TypeAlias = "tuple[Tensor, dict[str, float]]"
StdLevel: TypeAlias = Literal["group", "batch", "advantages"]
Epsilon: TypeAlias = Annotated[NonNegative, ActsWith("std_normalize")]


def overlong_penalty(lengths_B: Tensor, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """[B] DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13), to be added to the rewards.

    0 up to max_length - cache_length tokens, then falling linearly to -factor at max_length, and -factor beyond.
    """
    if not 0 < cache_length <= max_length:
        raise InputError(
            f"the overlong penalty needs 0 < cache_length <= max_length, not {cache_length}, {max_length}",
            key="cache_length",
        )
    excess = lengths_B.to(torch.float32) - (max_length - cache_length)
    return -factor * (excess / cache_length).clamp(0, 1)


def _scaled(groups: Groups, epsilon: float, std_normalize: bool, std_cal_level: StdLevel) -> Tensor:
    """[B] reward minus group mean, divided by the deviation of `std_cal_level` plus epsilon if `std_normalize`."""
    stds = {"group": groups.stds[groups.index], "batch": groups.std, "advantages": groups.std_of_deviations}
    return divided(groups.deviations, stds[std_cal_level], epsilon) if std_normalize else groups.deviations


@advantage("grpo")
def grpo(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    rollout_ids: GroupIds | None = None,
    epsilon: Epsilon = 1e-6,
    std_normalize: bool = True,
    std_cal_level: Annotated[StdLevel, ActsWith("std_normalize")] = "group",
    std_threshold: float | None = None,
    overlong: Annotated[Mapping[str, Any] | None, ArgumentsOf(overlong_penalty, ("lengths_B",))] = None,
    lengths: Tensor | None = None,
) -> Result:
    """(r - mean of its group) / (sample deviation + epsilon) (GRPO, arXiv 2402.03300, section 4.1.2).

    Without `std_normalize` there is no division (Dr. GRPO, 2503.20783); `std_cal_level: batch` divides by the deviation
    of all rewards of the batch, `advantages` by that of r - mean over the groups whose rewards differ (ScaleRL,
    2510.13786, section 4). Groups whose deviation is at most `std_threshold` get 0 and are counted as
    `filtered_count` (rows). Groups of one and zero-variance groups get 0. `overlong` are the arguments of
    `overlong_penalty` (max_length, cache_length, factor), which is added to the rewards first. `lengths` [B] are the
    sampled tokens of each row, by default the tokens of `mask`, which is empty for a masked truncated answer.
    """
    if overlong is not None:
        lengths = mask.sum(-1) if lengths is None else lengths
        rewards = rewards + overlong_penalty(lengths, **overlong).to(rewards.dtype)
    groups = Groups.of(rewards, group_ids, rollout_ids)
    scores, metrics = _scaled(groups, epsilon, std_normalize, std_cal_level), groups.metrics()
    if std_threshold is not None:
        zero_variance = (groups.stds <= std_threshold)[groups.index]
        scores, metrics["filtered_count"] = torch.where(zero_variance, 0.0, scores), float(zero_variance.sum())
    return to_tokens(scores, mask), metrics


@advantage("rloo")
def rloo(rewards: Tensor, group_ids: GroupIds, mask: Tensor, rollout_ids: GroupIds | None = None) -> Result:
    """r minus the mean of the *other* rollouts of its group (RLOO, arXiv 2402.14740); 0 in groups of one."""
    groups = Groups.of(rewards, group_ids, rollout_ids)
    counts = groups.counts[groups.index]
    return to_tokens(groups.deviations * counts / (counts - 1).clamp(min=1), mask), groups.metrics()


@advantage("opmd")
def opmd(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    rollout_ids: GroupIds | None = None,
    opmd_baseline: Literal["mean", "logavgexp"] = "mean",
    tau: Annotated[NonNegative, ActsWith("opmd_baseline", "logavgexp")] = 1.0,
) -> Result:
    """r minus its group's baseline. 0 in groups of one.

    The baseline is the mean, or with `logavgexp` tau log mean exp(r / tau), the softened maximum that mirror descent
    derives (Kimi k1.5, arXiv 2501.12599, section 2.3.2).
    """
    groups = Groups.of(rewards, group_ids, rollout_ids)
    if opmd_baseline == "mean":
        return to_tokens(groups.deviations, mask), groups.metrics()
    if tau <= 0:
        raise InputError("opmd_baseline: logavgexp needs a tau above 0", key="tau")
    peak = groups.extreme(groups.rewards, "amax")[groups.index]
    average = groups.sums(((groups.rewards - peak) / tau).exp()) / groups.counts
    return to_tokens(groups.rewards - peak - tau * average.log()[groups.index], mask), groups.metrics()


@advantage("asymre")
def asymre(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    rollout_ids: GroupIds | None = None,
    baseline_shift: float = -0.1,
) -> Result:
    """r - (mean of its group + baseline_shift): a baseline below the mean dwells on successes, safe off-policy
    (AsymRE, arXiv 2506.20520, section 4)."""
    groups = Groups.of(rewards, group_ids, rollout_ids)
    return to_tokens(groups.deviations - baseline_shift, mask), groups.metrics()


@advantage("rec")
def rec(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    rollout_ids: GroupIds | None = None,
    epsilon: Epsilon = 1e-6,
    std_normalize: bool = False,
    drop: Literal["none", "balance"] | None = None,
    seed: Annotated[int, ActsWith("drop")] = 0,
) -> Result:
    """r minus its group's mean, not divided by default (arXiv 2509.24203, section 2).

    `drop: balance` gives 0 to randomly chosen losers (by `seed`), as many as outnumber the winners (r >= mean) of the
    group, and takes the mean over the rest (RED-Drop, section 4.3).
    """
    groups = Groups.of(rewards, group_ids, rollout_ids)
    kept = torch.ones_like(groups.rewards, dtype=torch.bool)
    if drop == "balance":
        losers, group_of = groups.losers()
        order = torch.randperm(len(losers), generator=torch.Generator().manual_seed(seed)).to(kept.device)
        for group in range(len(groups.counts)):
            lost = order[(losers & (group_of == group))[order]]
            surplus = 2 * len(lost) - int(groups.counts[group])
            kept &= ~torch.isin(groups.rollouts, lost[: max(surplus, 0)])
    scores = torch.zeros_like(groups.rewards)
    rest = Groups.of(groups.rewards[kept], groups.index[kept], groups.rollouts[kept])
    scores[kept] = _scaled(rest, epsilon, std_normalize, "group")
    return to_tokens(scores, mask), groups.metrics() | {
        "drop_balance": float((~kept).double().mean()) if len(kept) else 0.0
    }


@advantage("raft")
def raft(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    rollout_ids: GroupIds | None = None,
    selection: Literal["best", "threshold", "all"] = "best",
    threshold: Annotated[float, ActsWith("selection", "threshold")] = 0.0,
) -> Result:
    """The weight of each row in SFT on selected rollouts (RAFT, arXiv 2304.06767, algorithm 1).

    `best`: the rollouts with their group's best reward, none in zero-variance groups; `threshold`: those with a reward
    above it; `all`: every row, for a workflow that selects its own rows. Selected rows weigh tokens / selected tokens,
    so that under `token-mean` the loss is the mean over them.
    """
    groups = Groups.of(rewards, group_ids, rollout_ids)
    if selection == "best":
        best = groups.rewards == groups.extreme(groups.rewards, "amax")[groups.index]
        chosen = best & (groups.stds[groups.index] > 0)
    elif selection == "threshold":
        chosen = groups.rewards > threshold
    else:
        chosen = torch.ones_like(groups.rewards, dtype=torch.bool)
    tokens = mask.sum(-1)
    weight = tokens.sum() / (tokens * chosen).sum().clamp(min=1)
    metrics = groups.metrics() | {"raft/chosen": float(chosen.double().mean()) if len(chosen) else 0.0}
    return to_tokens(chosen * weight, mask), metrics


@advantage("step_wise_grpo")
def step_wise_grpo(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    run_ids: GroupIds,
    turns: Tensor | None = None,
    epsilon: Epsilon = 1e-6,
    std_normalize: bool = True,
    std_cal_level: Annotated[StdLevel, ActsWith("std_normalize")] = "group",
    std_threshold: float | None = None,
    enable_step_norm: bool = False,
    penalties: Tensor | None = None,
) -> Result:
    """GRPO for runs of several rows: compares the rewards of the runs' last rows within a group.

    The advantage of a run goes to all its rows, divided by their number with `enable_step_norm`. `run_ids` [B] name the
    run within its group; `turns` [B] give the order of its rows (by default the order in the batch). `penalties` [B] (a
    KL penalty) are already in `rewards`: those of a run's earlier rows are subtracted from its last reward too.
    """
    group_of = Groups.of(rewards, group_ids).index
    run_of = Groups.of(rewards, run_ids).index
    runs = group_of * (int(run_of.max()) + 1 if len(run_of) else 1) + run_of
    by_run = Groups.of(rewards, runs)
    order = torch.arange(len(rewards), device=rewards.device) if turns is None else turns
    last = order == by_run.extreme(order.double(), "amax")[by_run.index]
    if int(last.sum()) != len(by_run.counts):
        raise InputError("two rows of one run have the same turn; which of them is the last?", key="turns")
    row = torch.zeros_like(by_run.counts).scatter_(0, by_run.index[last], last.nonzero()[:, 0])
    run_rewards = rewards[row]
    if penalties is not None:
        earlier = torch.where(last, 0.0, penalties).to(rewards.dtype)
        run_rewards = run_rewards - torch.zeros_like(run_rewards).index_add_(0, by_run.index, earlier)
    groups = Groups.of(run_rewards, group_of[row])
    scores, metrics = _scaled(groups, epsilon, std_normalize, std_cal_level), groups.metrics()
    if std_threshold is not None:
        zero_variance = (groups.stds <= std_threshold)[groups.index]
        metrics["filtered_count"] = float(by_run.counts[zero_variance].sum())
        scores = torch.where(zero_variance, 0.0, scores)
    if enable_step_norm:
        scores = scores / by_run.counts
    return to_tokens(scores[by_run.index], mask), metrics


@advantage("m2po")
@without_gradient
def m2po(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    rollout_ids: GroupIds | None = None,
    m2_threshold: NonNegative = 0.04,
    epsilon: NonNegative = 1e-6,
) -> Result:
    """GRPO's advantages; 0 where the second moment of the log-ratio to the sampling policy is too large (M2PO, Zheng et
    al. 2025, "Prosperity before collapse", algorithm 1).

    Considers the tokens that PPO might clip: A > 0 and log pi / mu > 0, or both negative. Of these, those with the
    largest squares are excluded until the mean square of the others is at most `m2_threshold`.
    """
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    log_ratio = clean(old_logprobs - rollout_logprobs, mask).double()
    places = (mask & (advantages * log_ratio > 0)).nonzero()
    squares, order = log_ratio[places[:, 0], places[:, 1]].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = int((means <= m2_threshold).sum())  # the running means of a sorted sequence never decrease
    left_out = places[order[kept:]]
    advantages[left_out[:, 0], left_out[:, 1]] = 0.0
    count = max(int(mask.sum()), 1)
    return advantages, metrics | {
        "m2po/second_moment": float(means[-1]) if len(means) else 0.0,
        "m2po/second_moment_kept": float(means[kept - 1]) if kept else 0.0,
        "m2po/masked": len(left_out) / count,
    }


@advantage("clipb")
@without_gradient
def clipb(
    rewards: Tensor,
    group_ids: GroupIds,
    mask: Tensor,
    old_logprobs: Tensor,
    entropies: Tensor,
    rollout_ids: GroupIds | None = None,
    mu: float = 2.5,
    epsilon: NonNegative = 1e-6,
) -> Result:
    """GRPO's advantages; 0 for tokens with A < 0 that would change the entropy most (Clip_B, arXiv 2602.03392).

    S = p (H + log p) for each sampled token, with its probability p and the entropy H at its position, in nats. Tokens
    with S below mean - `mu` deviations, both over all tokens of the batch, are excluded.
    """
    mask = as_mask(mask)
    require_finite(mask, old_logprobs=old_logprobs, entropies=entropies)
    advantages, metrics = grpo(rewards, group_ids, mask, rollout_ids, epsilon)
    logprobs = clean(old_logprobs, mask).double()
    signal = logprobs.exp() * (clean(entropies, mask).double() + logprobs)
    tokens = signal[mask]
    deviation = float(tokens.std(correction=0)) if len(tokens) else 0.0
    low = mask & (advantages < 0) & (signal < tokens.mean() - mu * deviation) if deviation > 1e-12 else mask & False
    return torch.where(low, 0.0, advantages), metrics | {"clipb/masked": float(low.sum()) / max(len(tokens), 1)}
