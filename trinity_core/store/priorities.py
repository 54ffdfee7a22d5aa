"""Priorities of groups in a replay buffer (`experience_buffer.replay_buffer`): the highest are trained on first.

A plugin adds its own: a class with `@PRIORITY_FNS.register("name")`, whose fields are the `priority_fn_args`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from trinity_core.registry import Registry


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be taken, as strategies and priority functions see it."""

    id: int
    """Ascending in order of insertion."""
    size: int
    """Rows."""
    newest: int
    """The newest policy version among its tokens; -1: none (given data)."""
    oldest: int
    """The oldest one."""
    explorer: str = ""
    """Who put it."""
    step: int = 0
    """The explore step that it is of."""
    uses: int = 0
    """Trainer steps that have used it."""


class PriorityFunction(ABC):
    """The priority of a group, and how often one may be used."""

    @property
    def use_limit(self) -> int | None:
        """Train steps that may use a group; None: any number."""
        return None

    @abstractmethod
    def priority(self, group: Candidate, noise: float) -> float:
        """The priority; `noise` is drawn anew, from a standard normal distribution, for each group and train step."""


PRIORITY_FNS: Registry[type[PriorityFunction]] = Registry("priority function")


@PRIORITY_FNS.register("linear_decay")
@dataclass(frozen=True)
class LinearDecay(PriorityFunction):
    """`newest version - decay * uses`: what a new policy sampled, and what was used less, first."""

    decay: float = 2.0

    def priority(self, group: Candidate, noise: float) -> float:
        """See the class."""
        return group.newest - self.decay * group.uses


@PRIORITY_FNS.register("linear_decay_use_count_control_randomization")
@PRIORITY_FNS.register("decay_limit_randomization")
@dataclass(frozen=True)
class DecayLimitRandomization(PriorityFunction):
    """`newest version - decay * uses + sigma * noise`, for groups used fewer than `use_count_limit` times (0: all)."""

    decay: float = 2.0
    use_count_limit: Annotated[int, Ge(0)] = 3
    sigma: Annotated[float, Ge(0)] = 0.0

    @property
    def use_limit(self) -> int | None:
        """`use_count_limit`."""
        return self.use_count_limit or None

    def priority(self, group: Candidate, noise: float) -> float:
        """See the class."""
        return group.newest - self.decay * group.uses + self.sigma * noise
