"""Experience operators: what may happen to a step's experiences before they are stored (`data_processor` section).

An operator is a function `(experiences, **args) -> experiences`; it may drop, change or add. Register your own in a
plugin with `@OPERATORS.register("name")`, or name it by its dotted path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from trinity_core.config import OperatorConfig
from trinity_core.data.experience import Experience
from trinity_core.workflows import Registry

Operator = Callable[..., list[Experience]]

OPERATORS: Registry[Operator] = Registry("experience operator")


@OPERATORS.register("reward_filter")
def reward_filter(
    experiences: list[Experience], min_reward: float = float("-inf"), max_reward: float = float("inf")
) -> list[Experience]:
    """Keep experiences whose reward lies within the bounds."""
    return [e for e in experiences if e.reward is not None and min_reward <= e.reward <= max_reward]


@OPERATORS.register("flat_group_filter")
def flat_group_filter(experiences: list[Experience]) -> list[Experience]:
    """Drop groups whose rewards are all equal: relative to each other their answers are neither good nor bad."""
    rewards: dict[str, set[float | None]] = {}
    for e in experiences:
        rewards.setdefault(e.group, set()).add(e.reward)
    return [e for e in experiences if len(rewards[e.group]) > 1]


def pipeline(configured: Sequence[OperatorConfig]) -> list[Callable[[list[Experience]], list[Experience]]]:
    """The operators of a configuration, in order. Raises `TrinityError` where one does not exist."""
    return [partial(OPERATORS.resolve(operator.name), **operator.args) for operator in configured]
