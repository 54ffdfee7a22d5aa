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
    return [
        experience if (total := experience.total_reward) is None else _shaped(experience, total, shapings)
        for experience in experiences
    ]


def _shaped(experience: Experience, total: float, shapings: Sequence[Shaping]) -> Experience:
    """Return the row with a new `total` reward. Token rewards are scaled with it; additions go to the sequence's
    reward."""
    reward, scale = (0.0 if experience.reward is None else experience.reward), 1.0
    for shaping in shapings:
        value = shaping.weight * _statistic(experience, shaping.stats_key)
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
    token_rewards = None if experience.token_rewards is None else experience.token_rewards * scale
    metrics = {**experience.metrics, "unshaped_reward": total}
    return replace(experience, reward=reward, token_rewards=token_rewards, metrics=metrics)


def _statistic(experience: Experience, name: str) -> float:
    statistics = {**experience.metrics, **experience.info}
    number = number_of(statistics.get(name))
    if number is None:
        names = sorted(key for key, value in statistics.items() if number_of(value) is not None)
        raise TrinityError(
            f"reward_shaping_mapper finds no number '{name}' in an experience's info or metrics; there is "
            f"{', '.join(names) or 'none'}",
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
    for experience, rollout in zip(experiences, rollouts_of(experiences), strict=True):
        last, _ = judged[experience.group].get(rollout, (experience.turn, 0.0))
        if experience.total_reward is not None and experience.turn >= last:
            score = min(1.0, max(0.0, experience.metrics.get("accuracy", experience.total_reward)))
            judged[experience.group][rollout] = experience.turn, score
    scores = {group: [score for _, score in rollouts.values()] for group, rollouts in judged.items() if rollouts}
    rates = {group: sum(of_group) / len(of_group) for group, of_group in scores.items()}
    return [
        replace(experience, metrics={**experience.metrics, "pass_rate": rates[experience.group]})
        if experience.group in rates
        else experience
        for experience in experiences
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

    def punished(experience: Experience) -> Experience:
        if experience.total_reward is None:
            return experience
        punishment = overlong_punishment(
            int(experience.sampled.sum()), max_response_length, cache_length, penalty_factor
        )
        reward = punishment + (0.0 if experience.reward is None else experience.reward)
        return replace(experience, reward=reward, metrics={**experience.metrics, "overlong_penalty": punishment})

    return [punished(experience) for experience in experiences]


@OPERATORS.register("mask_response_truncated")
def mask_response_truncated(experiences: list[Experience]) -> list[Experience]:
    """Exclude truncated answers from the loss; their rewards still count in their groups.

    DAPO's overlong filtering (arXiv 2503.14476, section 3.4).
    """
    return [
        replace(experience, action_mask=np.zeros_like(experience.action_mask)) if experience.truncated else experience
        for experience in experiences
    ]


@OPERATORS.register("taskset_balance_filter")
def taskset_balance_filter(
    experiences: list[Experience], shares: dict[str, Annotated[float, Ge(0)]] | None = None
) -> list[Experience]:
    """Drop groups so that the task sets have the ratio of `shares` (name → share; by default equal).

    The first groups of each task set are kept. A task set without a share is kept as a whole. So are all if a task set
    with a share has no group in the step, because there is nothing to balance.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for experience in experiences:
        name = str(experience.info.get("taskset", ""))
        if experience.group not in groups[name]:
            groups[name].append(experience.group)
    weights = dict.fromkeys(groups, 1.0) if shares is None else {name: s for name, s in shares.items() if s > 0}
    if not weights or any(not groups.get(name) for name in weights):
        return experiences
    unit = min(len(groups[name]) / share for name, share in weights.items())
    none = set() if shares is None else {name for name, share in shares.items() if share == 0}
    kept = {
        group
        for name, members in groups.items()
        if name not in none
        for group in (members[: int(unit * weights[name] + 1e-9)] if name in weights else members)
    }
    return [experience for experience in experiences if experience.group in kept]
