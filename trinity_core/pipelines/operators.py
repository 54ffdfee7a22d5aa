"""Experience operators, applied to a step's experiences before they are stored (`data_processor` section).

An operator is a function `(experiences, **args) -> experiences`; it may drop, change or add experiences. Register your
own in a plugin with `@OPERATORS.register("name")`, or name it by its dotted path.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from statistics import pstdev
from typing import Annotated, Protocol

from annotated_types import Ge

from trinity_core.base.errors import InputError, TransientFault, TrinityError
from trinity_core.config import OperatorConfig
from trinity_core.data.experience import Experience, require_json, rollout_rewards, rollouts_of
from trinity_core.data.rejected import FAILED_IN_A_ROW
from trinity_core.workflows import Registry

log = logging.getLogger(__name__)

Operator = Callable[..., list[Experience]]

OPERATORS: Registry[Operator] = Registry("experience operator", inputs=("data_juicer_server",), leading=1)


@OPERATORS.register("reward_filter")
def reward_filter(
    experiences: list[Experience], min_reward: float = float("-inf"), max_reward: float = float("inf")
) -> list[Experience]:
    """Keep rollouts whose reward, the mean of their experiences', is within the bounds."""
    if max_reward < min_reward:
        raise InputError(
            f"reward_filter: max_reward {max_reward:g} is below min_reward {min_reward:g}", key="max_reward"
        )
    rewards = rollout_rewards(experiences)
    return [
        e
        for e, reward in zip(experiences, rewards, strict=True)
        if reward is not None and min_reward <= reward <= max_reward
    ]


@OPERATORS.register("zero_variance_group_filter")
@OPERATORS.register("flat_group_filter")  # old name, still valid in YAML
def zero_variance_group_filter(experiences: list[Experience]) -> list[Experience]:
    """Drop groups whose rollouts all have the same reward: their relative advantages are zero."""
    return _of_groups(experiences, rollout_rewards(experiences), lambda rewards: len(set(rewards)) > 1)


@OPERATORS.register("reward_std_filter")
def reward_std_filter(experiences: list[Experience], threshold: Annotated[float, Ge(0)] = 0.0) -> list[Experience]:
    """Keep groups whose rollouts' rewards have a population standard deviation above the threshold."""
    return _of_groups(experiences, rollout_rewards(experiences), lambda rewards: pstdev(rewards) > threshold)


@OPERATORS.register("dapo_dynamic_sampling")
def dapo_dynamic_sampling(
    experiences: list[Experience], metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> list[Experience]:
    """Keep groups in which some rollouts, but not all, are correct (DAPO, arXiv 2503.14476, eq. 11).

    A rollout is correct if its part `metric_key`, or its reward if there is no such part, is above the threshold. A
    length penalty in the reward plays no role.
    """
    scores = [
        e.metrics.get(metric_key, reward) for e, reward in zip(experiences, rollout_rewards(experiences), strict=True)
    ]
    right = [None if score is None else float(score > correct_threshold) for score in scores]
    return _of_groups(experiences, right, lambda verdicts: len(set(verdicts)) > 1)


@OPERATORS.register("invalid_reward_filter")
def invalid_reward_filter(experiences: list[Experience]) -> list[Experience]:
    """Drop rollouts without a reward, or with a non-finite one."""
    rewards = rollout_rewards(experiences)
    return [e for e, reward in zip(experiences, rewards, strict=True) if reward is not None and isfinite(reward)]


def _of_groups(
    experiences: list[Experience], values: Sequence[float | None], keeps: Callable[[list[float]], bool]
) -> list[Experience]:
    """Return the groups that `keeps` selects by their rollouts' values; `values` has one entry per experience, its
    rollout's."""
    by_group: dict[str, dict[Hashable, float]] = {}
    for e, rollout, value in zip(experiences, rollouts_of(experiences), values, strict=True):
        if value is not None:
            by_group.setdefault(e.group, {})[rollout] = value
    kept = {group for group, rollouts in by_group.items() if keeps(list(rollouts.values()))}
    return [e for e in experiences if e.group in kept]


@OPERATORS.register("dynamic_sampling")
def dynamic_sampling(
    experiences: list[Experience],
    std_threshold: Annotated[float, Ge(0)] = 0.0,
    rows: Annotated[int, Ge(1)] | None = None,
) -> list[Experience]:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): keep groups whose rewards deviate by more than the threshold.

    With `rows` (the size of a batch), groups beyond what fills a batch are dropped too: explore more tasks per step
    than a batch needs, and no answer grows stale waiting for a later one. If too few are left, the trainer takes them
    once the explorer waits for its weights, and skips an empty batch, so that neither side waits forever. Answers
    without a verdict are dropped. Raises TrinityError for any other experience without a reward.
    """
    if not experiences:
        return []
    import torch

    from trinity_core.algorithms.advantages.grouping import fill_batch, groups_with_variance

    experiences = [e for e in experiences if not e.is_unscored]
    rewards = [e.total_reward for e in experiences if e.total_reward is not None]
    if len(rewards) < len(experiences):
        raise TrinityError(
            "dynamic_sampling compares rewards, but the workflow gave an experience without one", key="reward"
        )
    groups: list[str | int] = [e.group or i for i, e in enumerate(experiences)]
    keep = groups_with_variance(torch.tensor(rewards), groups, std_threshold, rollouts_of(experiences))
    indices, _ = fill_batch(keep, groups, len(experiences) if rows is None else rows)
    return [experiences[i] for i in indices.tolist()]


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group on whose experiences an operator failed."""

    group: str
    operator: str
    error: Exception


class Operators(Protocol):
    """The operators of a run, in this process or a separate one."""

    @property
    def names(self) -> Sequence[str]:
        """Their names, in their order."""

    @property
    def running(self) -> str:
        """The operator that was started last; "" before the first."""

    def run(
        self, experiences: list[Experience], failed: Callable[[FailedGroup], object]
    ) -> tuple[list[Experience], dict[str, dict[str, int]]]:
        """See `OperatorPipeline.run`."""

    def close(self) -> None:
        """Close resources of the operators."""


@dataclass
class OperatorPipeline:
    """The operators of a run, in order, each with its name."""

    operators: Sequence[tuple[str, Callable[[list[Experience]], list[Experience]]]]
    failed_in_a_row: Counter[int] = field(default_factory=Counter)
    """Position of an operator → groups on which it failed since the last step in which it worked on one."""
    running: str = ""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.operators]

    def close(self) -> None:
        """As `Operators`: nothing."""

    def run(
        self, experiences: list[Experience], failed: Callable[[FailedGroup], object] = lambda _: None
    ) -> tuple[list[Experience], dict[str, dict[str, int]]]:
        """Return the remaining experiences, and how many each operator dropped: group → operator → number.

        An operator that renames a group counts as having dropped it and added another one. If an operator fails, it is
        run on each group alone; groups on which it fails again are dropped by `<operator> failed`, and `failed` is
        called with each. Raises its error if it fails on all groups and on `FAILED_IN_A_ROW` of them.
        """
        dropped: dict[str, dict[str, int]] = {}
        for index in range(len(self.operators)):
            experiences = self.apply(index, experiences, failed, dropped)
        return experiences, dropped

    def apply(
        self, index: int, experiences: list[Experience], failed: Callable[[FailedGroup], object],
        dropped: dict[str, dict[str, int]],
    ) -> list[Experience]:  # fmt: skip
        """Run the operator at one position; adds to `dropped`. See `run`."""
        name, operator = self.operators[index]
        if index == len(self.operators) - 1:  # after an earlier one, `invalid_reward_filter` may follow
            operator = partial(_storable, operator)
        self.running = name
        counts = _groups(experiences)
        wrong: list[FailedGroup] = []
        try:
            left = operator(_copies(experiences))
            if experiences:
                self.failed_in_a_row[index] = 0
        except TransientFault:
            raise
        except Exception as error:
            log.warning("the experience operator '%s' fails; groups are tried one by one", name, exc_info=error)
            fine, wrong = self._tried(index, operator, experiences, error)
            left = operator(_copies(fine)) if fine else []
        for failure in wrong:
            failed(failure)
            dropped.setdefault(failure.group, {})[f"{name} failed"] = counts.pop(failure.group)
        for group, number in (counts - _groups(left)).items():
            by_operator = dropped.setdefault(group, {})
            by_operator[name] = by_operator.pop(name, 0) + number
        return left

    def _tried(
        self, index: int, operator: Callable[[list[Experience]], list[Experience]], experiences: list[Experience],
        error: Exception,
    ) -> tuple[list[Experience], list[FailedGroup]]:  # fmt: skip
        """Run the operator on each group alone; return the experiences of groups that succeed, and the failed
        groups."""
        name = self.names[index]
        wrong: dict[str, FailedGroup] = {}
        for group in _groups(experiences):
            try:
                operator(_copies([e for e in experiences if e.group == group]))
            except TransientFault:
                raise
            except Exception as fault:
                log.debug("the experience operator '%s' fails with group %s", name, group, exc_info=fault)
                wrong[group] = FailedGroup(group, name, fault)
        fine = [e for e in experiences if e.group not in wrong]
        self.failed_in_a_row[index] = 0 if fine else self.failed_in_a_row[index] + len(wrong)
        if not wrong or self.failed_in_a_row[index] >= FAILED_IN_A_ROW:
            raise error
        return fine, list(wrong.values())


def _storable(operator: Operator, experiences: list[Experience]) -> list[Experience]:
    """Run an operator and check its result. Raises TrinityError for a non-finite reward, which no train step could use,
    and for an `info` that is not JSON."""
    left = operator(experiences)
    for e in left:
        require_json(e.info, "an experience operator")
        if e.total_reward is not None and not isfinite(e.total_reward):
            raise TrinityError(f"run {e.run} of group '{e.group}' has the reward {e.total_reward} after the operators")
    return left


def _groups(experiences: Sequence[Experience]) -> Counter[str]:
    return Counter(e.group for e in experiences)


def _copies(experiences: Sequence[Experience]) -> list[Experience]:
    """Copy experiences, which an operator may change before it fails."""
    return [e.copied() for e in experiences]


def pipeline(configured: Sequence[OperatorConfig], **inputs: object) -> OperatorPipeline:
    """Return the operators of a configuration, each with those of the run's `inputs` that it takes.

    Raises TrinityError if one does not exist.
    """
    return OperatorPipeline(
        [(config.name, partial(OPERATORS.resolve(config.name), **_args(config, inputs))) for config in configured]
    )


def _args(configured: OperatorConfig, inputs: Mapping[str, object]) -> dict[str, object]:
    accepted = {name: value for name, value in inputs.items() if OPERATORS.uses(configured.name, name)}
    return {**configured.args, **accepted}
