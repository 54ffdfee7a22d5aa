"""Which groups make the next batch: pure functions of each group's stored facts.

Strategies choose groups; priority functions (`experience_buffer.replay_buffer`) rank them. A plugin can add its own: a
class with `@PRIORITY_FNS.register("name")`, whose fields are the `priority_fn_args`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from trinity_core.base.errors import TrinityError
from trinity_core.base.registry import Registry
from trinity_core.base.signatures import Choices


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be taken, as strategies and priority functions see it."""

    id: int
    """Ascending in order of insertion."""
    size: int
    newest: int
    """The newest policy version among its tokens; -1: none (given data)."""
    oldest: int
    explorer: str = ""
    step: int = 0
    uses: int = 0
    """Number of trainer steps that have used it."""


class PriorityFunction(ABC):
    """The priority of a group, and how often a group may be used."""

    @property
    def use_limit(self) -> int | None:
        """Maximum number of train steps that may use a group; None: unlimited."""
        return None

    @abstractmethod
    def priority(self, group: Candidate, noise: float) -> float:
        """Return the priority. `noise` is standard normal, redrawn for each group and train step."""


PRIORITY_FNS: Registry[type[PriorityFunction]] = Registry("priority function")


@PRIORITY_FNS.register("linear_decay")
@dataclass(frozen=True)
class LinearDecay(PriorityFunction):
    """`newest version - decay * uses`: prefers groups sampled by newer policies and used less often."""

    decay: float = 2.0

    def priority(self, group: Candidate, noise: float) -> float:
        return group.newest - self.decay * group.uses


@PRIORITY_FNS.register("linear_decay_use_count_control_randomization")
@PRIORITY_FNS.register("decay_limit_randomization")
@dataclass(frozen=True)
class DecayLimitRandomization(PriorityFunction):
    """`newest version - decay * uses + sigma * noise`, for groups used fewer than `use_count_limit` times (0:
    unlimited)."""

    decay: float = 2.0
    use_count_limit: Annotated[int, Ge(0)] = 3
    sigma: Annotated[float, Ge(0)] = 0.0

    @property
    def use_limit(self) -> int | None:
        return self.use_count_limit or None

    def priority(self, group: Candidate, noise: float) -> float:
        return group.newest - self.decay * group.uses + self.sigma * noise


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups to train on, in this order, and groups too stale to ever train on."""

    take: list[Candidate] = field(default_factory=list)
    stale: list[Candidate] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(group.size for group in self.take)


class Strategy(ABC):
    """How a batch is chosen. The fields of a subclass are the possible `algorithm.sample_strategy_args`."""

    cooldown: float | None = None
    """Seconds after which a used group may be taken again; None: never."""
    use_limit: int | None = None
    """Maximum number of train steps that may use a group; None: unlimited."""
    whole_queue: bool = False
    """True if the order differs from insertion order, so that every ready group must be considered."""
    favours_newer: bool = False
    """True if newer groups may displace a group from every batch: in time it becomes stale."""
    expert_ratio: float = 0.0
    """Share of a batch's rows that comes from expert data."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """Choose at least `rows` rows in whole groups, or all candidates. `version` is the trainer's."""


def first_explore_step(groups: Sequence[Candidate]) -> list[Candidate]:
    """Return the `groups` from the same explore step as the first one."""
    return [group for group in groups if (group.explorer, group.step) == (groups[0].explorer, groups[0].step)]


STRATEGIES: Registry[type[Strategy]] = Registry("sample strategy")


def take_until(candidates: Sequence[Candidate], rows: int) -> list[Candidate]:
    """Return the shortest prefix of `candidates` with at least `rows` rows."""
    groups_taken: list[Candidate] = []
    count = 0
    for group in candidates:
        if count >= rows:
            break
        groups_taken.append(group)
        count += group.size
    return groups_taken


@STRATEGIES.register("fifo")
@STRATEGIES.register("default")
@dataclass(frozen=True)
class Fifo(Strategy):
    """Takes groups in order of insertion, each once."""

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        return Choice(take_until(candidates, rows))


def _priority_fns() -> list[str]:
    return list(PRIORITY_FNS)


@STRATEGIES.register("priority")
@dataclass(frozen=True)
class Priority(Strategy):
    """Takes the highest priority first, by `priority_fn` with its `priority_fn_args`; ties go to the older group.

    With `reuse_cooldown_time` a group may be taken again after that many seconds; without, each is taken once. `decay`
    is the function's, if given. Noise derives from `seed`, the trainer's version and the group's place among the
    candidates.
    """

    reuse_cooldown_time: float | None = None
    decay: float | None = None
    priority_fn: Annotated[str, Choices(_priority_fns)] = "linear_decay"
    priority_fn_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    function: PriorityFunction = field(init=False, repr=False, compare=False)
    whole_queue = True  # the newest groups stand at the end
    favours_newer = True

    def __post_init__(self) -> None:
        decay = {} if self.decay is None else {"decay": self.decay}
        function = PRIORITY_FNS.resolve(self.priority_fn)(**decay | self.priority_fn_args)
        vars(self).update(function=function, use_limit=function.use_limit, cooldown=self.reuse_cooldown_time)

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        noise = np.random.default_rng([self.seed, version]).standard_normal(len(candidates)).tolist()
        priorities = [self.function.priority(group, draw) for group, draw in zip(candidates, noise, strict=True)]
        ranked = sorted(zip(priorities, candidates, strict=True), key=lambda pair: (-pair[0], pair[1].id))
        return Choice(take_until([group for _, group in ranked], rows))


@STRATEGIES.register("staleness_control")
@dataclass(frozen=True)
class StalenessControl(Strategy):
    """Takes groups in order of insertion, except those more than `max_staleness` versions behind."""

    max_staleness: int = 1
    whole_queue = True

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """Drop groups whose oldest version is too old, and take the oldest of the rest."""
        stale = [group for group in candidates if 0 <= group.oldest < version - self.max_staleness]
        gone = {group.id for group in stale}
        return Choice(take_until([group for group in candidates if group.id not in gone], rows), stale)


def _names_within_mix() -> list[str]:
    return [name for name in STRATEGIES if name != "mix"]


@STRATEGIES.register("mix")
@dataclass(frozen=True)
class Mix(Strategy):
    """A share of expert rows in each batch; `inner` chooses the rest from the rollouts."""

    expert_data_ratio: float = 0.5
    inner: Annotated[Strategy, Choices(_names_within_mix)] = field(default_factory=Fifo)

    def __post_init__(self) -> None:
        if not 0 <= self.expert_data_ratio < 1:
            raise TrinityError(f"expert_data_ratio must be at least 0 and below 1, got {self.expert_data_ratio}")
        of_inner = ("cooldown", "use_limit", "whole_queue", "favours_newer")
        vars(self).update({name: getattr(self.inner, name) for name in of_inner}, expert_ratio=self.expert_data_ratio)

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """As `inner`; `rows` counts only rollouts."""
        return self.inner.choose(candidates, rows, version)


def make_strategy(
    name: str | None, args: dict[str, Any] | None = None, max_staleness: int | None = None,
    replay: Mapping[str, Any] | None = None,
) -> Strategy:  # fmt: skip
    """Return the strategy of `algorithm.sample_strategy` (with its `_args`).

    With `max_staleness` (`synchronizer.max_staleness`) no older rows are drawn. With `replay` rollouts are drawn by
    priority; it provides arguments of `Priority` that `args` leaves out. Raises TrinityError for an unknown name or
    argument.
    """
    args = dict(args or {})
    name = name or "default"
    try:
        if name == "mix":
            ratio = {"expert_data_ratio": args.pop("expert_data_ratio")} if "expert_data_ratio" in args else {}
            return Mix(**ratio, inner=make_strategy(args.pop("inner", None), args, max_staleness, replay))
        if name in ("default", "fifo") and replay is not None:
            name = "priority"
        if max_staleness is not None:
            name = "staleness_control" if name in ("default", "fifo") else name
            args.setdefault("max_staleness", max_staleness)
        if name == "priority":
            args = {**(replay or {}), **args}
        strategy = STRATEGIES.resolve(name)(**args)
    except TypeError as error:
        raise TrinityError(f"sample_strategy_args of {name!r} do not fit: {error}") from error
    return strategy
