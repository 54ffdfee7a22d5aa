"""Experience operators that change rewards or loss masks, and that balance task sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from trinity_core.base.errors import InputError, TrinityError
from trinity_core.base.signatures import Arguments
from trinity_core.data.experience import Experience, rollouts_of
from trinity_core.data.values import number_of
from trinity_core.pipelines.operators import OPERATORS
from trinity_core.workflows.rewards.boxed import overlong_punishment


class Shaping(Arguments):
    """One change of the reward."""

    stats_key: str
    """Name of a number in the experience's `info` or `metrics`."""
    op_type: Literal["ADD", "SUB", "MUL", "DIV"] = "ADD"
    weight: float = 1.0


@OPERATORS.register("reward_shaping_mapper")
def reward_shaping_mapper(
    experiences: list[Experience], reward_shaping_configs: list[Shaping] | None = None
) -> list[Experience]:
    """Add `weight` times a statistic to the reward, subtract it, or multiply or divide by it, one shaping after
    another.

    Answers without a verdict keep none. Raises TrinityError if an experience lacks the statistic, or on a division by
    0.
    """
    shapings = [Shaping.model_validate(settings) for settings in reward_shaping_configs or ()]
    if not shapings:
        raise InputError(
            "reward_shaping_mapper: reward_shaping_configs must name at least one statistic",
            key="reward_shaping_configs",
        )
    return [one if (total := one.total_reward) is None else _shaped(one, total, shapings) for one in experiences]


def _shaped(one: Experience, total: float, shapings: Sequence[Shaping]) -> Experience:
    """Return the row with a new `total` reward. Token rewards are scaled with it; additions go to the sequence's
    reward."""
    reward, scale = (0.0 if one.reward is None else one.reward), 1.0
    for shaping in shapings:
        value = shaping.weight * _statistic(one, shaping.stats_key)
        match shaping.op_type:
            case "ADD":
                reward += value
            case "SUB":
                reward -= value
            case "MUL":
                reward, scale = reward * value, scale * value
            case _ if value:
                reward, scale = reward / value, scale / value
            case _:
                raise TrinityError(
                    f"reward_shaping_mapper would divide by the statistic '{shaping.stats_key}', a 0",
                    key=shaping.stats_key,
                )
    token_rewards = None if one.token_rewards is None else one.token_rewards * scale
    metrics = {**one.metrics, "unshaped_reward": total}
    return replace(one, reward=reward, token_rewards=token_rewards, metrics=metrics)


def _statistic(one: Experience, name: str) -> float:
    statistics = {**one.metrics, **one.info}
    number = number_of(statistics.get(name))
    if number is None:
        known = sorted(key for key, value in statistics.items() if number_of(value) is not None)
        raise TrinityError(
            f"reward_shaping_mapper finds no number '{name}' in an experience's info or metrics; there is "
            f"{', '.join(known) or 'none'}",
            key=name,
        )
    return number


@OPERATORS.register("pass_rate_calculator")
def pass_rate_calculator(experiences: list[Experience]) -> list[Experience]:
    """Record the pass rate of each group as the metric `pass_rate` of its experiences.

    It is the mean over the group's rollouts of the reward's part `accuracy` (or of the reward if there is none) of the
    last judged turn, clipped to 0 … 1. Answers without a verdict do not count; a group with only such answers has no
    pass rate.
    """
    judged: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for one, rollout in zip(experiences, rollouts_of(experiences), strict=True):
        last, _ = judged[one.group].get(rollout, (one.turn, 0.0))
        if one.total_reward is not None and one.turn >= last:
            score = min(1.0, max(0.0, one.metrics.get("accuracy", one.total_reward)))
            judged[one.group][rollout] = one.turn, score
    scores = {group: [score for _, score in rollouts.values()] for group, rollouts in judged.items() if rollouts}
    rates = {group: sum(of_group) / len(of_group) for group, of_group in scores.items()}
    return [
        replace(one, metrics={**one.metrics, "pass_rate": rates[one.group]}) if one.group in rates else one
        for one in experiences
    ]


@OPERATORS.register("overlong_penalty")
def overlong_penalty(
    experiences: list[Experience],
    max_response_length: Annotated[int, Ge(1)],
    cache_length: Annotated[int, Ge(1)],
    penalty_factor: Annotated[float, Ge(0)] = 1.0,
) -> list[Experience]:
    """Add DAPO's soft penalty for long answers to the reward (arXiv 2503.14476, eq. 13).

    It is 0 up to `max_response_length - cache_length` sampled tokens, and falls to `-penalty_factor` at
    `max_response_length`. All sampled tokens count, even those that `mask_response_truncated` excluded from the loss.
    """
    if cache_length > max_response_length:
        raise InputError(
            f"overlong_penalty: cache_length {cache_length} is over max_response_length", key="cache_length"
        )

    def punished(one: Experience) -> Experience:
        if one.total_reward is None:
            return one
        punishment = overlong_punishment(int(one.sampled.sum()), max_response_length, cache_length, penalty_factor)
        reward = punishment + (0.0 if one.reward is None else one.reward)
        return replace(one, reward=reward, metrics={**one.metrics, "overlong_penalty": punishment})

    return [punished(one) for one in experiences]


@OPERATORS.register("mask_response_truncated")
def mask_response_truncated(experiences: list[Experience]) -> list[Experience]:
    """Exclude truncated answers from the loss; their rewards still count in their groups.

    DAPO's overlong filtering (arXiv 2503.14476, section 3.4).
    """
    return [replace(one, action_mask=np.zeros_like(one.action_mask)) if one.truncated else one for one in experiences]


@OPERATORS.register("taskset_balance_filter")
def taskset_balance_filter(
    experiences: list[Experience], shares: dict[str, Annotated[float, Ge(0)]] | None = None
) -> list[Experience]:
    """Drop groups so that the task sets have the ratio of `shares` (name → share; by default equal).

    The first groups of each task set are kept. A task set without a share is kept as a whole. So are all if a task set
    with a share has no group in the step, because there is nothing to balance.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for one in experiences:
        name = str(one.info.get("taskset", ""))
        if one.group not in groups[name]:
            groups[name].append(one.group)
    wanted = dict.fromkeys(groups, 1.0) if shares is None else {name: s for name, s in shares.items() if s > 0}
    if not wanted or any(not groups.get(name) for name in wanted):
        return experiences
    unit = min(len(groups[name]) / share for name, share in wanted.items())
    none = set() if shares is None else {name for name, share in shares.items() if share == 0}
    kept = {
        group
        for name, members in groups.items()
        if name not in none
        for group in (members[: int(unit * wanted[name] + 1e-9)] if name in wanted else members)
    }
    return [one for one in experiences if one.group in kept]
