"""Experience operators: what may happen to a step's experiences before they are stored (`data_processor` section).

An operator is a function `(experiences, **args) -> experiences`; it may drop, change or add. Register your own in a
plugin with `@OPERATORS.register("name")`, or name it by its dotted path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from trinity_core.config import OperatorConfig
from trinity_core.data.experience import Experience
from trinity_core.errors import TrinityError
from trinity_core.workflows import Registry

Operator = Callable[..., list[Experience]]

OPERATORS: Registry[Operator] = Registry("experience operator", leading=1)


@OPERATORS.register("reward_filter")
def reward_filter(
    experiences: list[Experience], min_reward: float = float("-inf"), max_reward: float = float("inf")
) -> list[Experience]:
    """Keep experiences whose reward lies within the bounds."""
    return [e for e in experiences if e.reward is not None and min_reward <= e.reward <= max_reward]


@OPERATORS.register("zero_variance_group_filter")
@OPERATORS.register("flat_group_filter")  # old name, still valid in YAML
def zero_variance_group_filter(experiences: list[Experience]) -> list[Experience]:
    """Drop groups whose rewards are all equal: relative to each other their answers are neither good nor bad."""
    rewards: dict[str, set[float]] = {e.group: set() for e in experiences}
    for e in experiences:
        if e.reward is not None:
            rewards[e.group].add(e.reward)
    return [e for e in experiences if len(rewards[e.group]) > 1]


@OPERATORS.register("dynamic_sampling")
def dynamic_sampling(
    experiences: list[Experience], std_threshold: float = 0.0, rows: int | None = None
) -> list[Experience]:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): keep groups whose rewards deviate by more than the threshold.

    Where `rows` is given (that of a batch), groups beyond what fills them are dropped too: explore more tasks a step
    than a batch needs and no answer waits, growing old, for a later one. Where too few are left the trainer takes them
    once the explorer waits for its weights, and steps over a batch of none: nobody waits for ever.
    Answers without a verdict are dropped. Raises TrinityError for any other experience without a reward.
    """
    import torch

    from trinity_core.algorithms.sampling import fill_batch, groups_with_variance

    experiences = [e for e in experiences if not e.is_unscored]
    rewards = [e.reward for e in experiences if e.reward is not None]
    if len(rewards) < len(experiences):
        raise TrinityError("dynamic_sampling compares rewards, but the workflow gave an experience without one")
    groups: list[str | int] = [e.group or i for i, e in enumerate(experiences)]
    keep = groups_with_variance(torch.tensor(rewards), groups, std_threshold)
    chosen, _ = fill_batch(keep, groups, len(experiences) if rows is None else rows)
    return [experiences[i] for i in chosen.tolist()]


@dataclass(frozen=True)
class OperatorPipeline:
    """The operators of a run, in order, each with its name."""

    operators: Sequence[tuple[str, Callable[[list[Experience]], list[Experience]]]]

    def run(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, dict[str, int]]]:
        """What the operators leave, and how many experiences each dropped: group -> operator -> number.

        An operator that renames a group has dropped the group and added another one.
        """
        dropped: dict[str, dict[str, int]] = {}
        for name, operator in self.operators:
            before = Counter(e.group for e in experiences)
            experiences = operator(experiences)
            for group, number in (before - Counter(e.group for e in experiences)).items():
                by_operator = dropped.setdefault(group, {})
                by_operator[name] = by_operator.pop(name, 0) + number
        return experiences, dropped


def pipeline(configured: Sequence[OperatorConfig]) -> OperatorPipeline:
    """The operators of a configuration. Raises `TrinityError` where one does not exist."""
    return OperatorPipeline([(each.name, partial(OPERATORS.resolve(each.name), **each.args)) for each in configured])
