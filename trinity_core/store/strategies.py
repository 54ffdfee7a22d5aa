"""Which groups make the next batch: pure functions of the stored facts of each group.

Strategies draw them; priority functions (`experience_buffer.replay_buffer`) say which come first. A plugin adds its
own: a class with `@PRIORITY_FNS.register("name")`, whose fields are the `priority_fn_args`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from trinity_core.errors import TrinityError
from trinity_core.registry import Registry
from trinity_core.signatures import Choices


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
        """The priority; `noise` is redrawn, from a standard normal distribution, for each group and train step."""


PRIORITY_FNS: Registry[type[PriorityFunction]] = Registry("priority function")


@PRIORITY_FNS.register("linear_decay")
@dataclass(frozen=True)
class LinearDecay(PriorityFunction):
    """`newest version - decay * uses`: what a new policy sampled, and what was used less, first."""

    decay: float = 2.0

    def priority(self, group: Candidate, noise: float) -> float:
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
        return group.newest - self.decay * group.uses + self.sigma * noise


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups to train on, in this order, and groups too stale to ever train on."""

    take: list[Candidate] = field(default_factory=list)
    stale: list[Candidate] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows taken."""
        return sum(group.size for group in self.take)


class Strategy(ABC):
    """How a batch is chosen. The fields of a strategy are what `algorithm.sample_strategy_args` may give."""

    @property
    def cooldown(self) -> float | None:
        """Seconds after which a used group may be taken again; None: never."""
        return None

    @property
    def use_limit(self) -> int | None:
        """Train steps that may use a group; None: any number."""
        return None

    @property
    def whole_queue(self) -> bool:
        """True if the order differs from insertion order, so that every ready group must be considered."""
        return False

    @property
    def expert_ratio(self) -> float:
        """The share of a batch's rows that comes from expert data."""
        return 0.0

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """Choose at least `rows` rows in whole groups, or all candidates. `version` is the trainer's."""


def first_explore_step(groups: Sequence[Candidate]) -> list[Candidate]:
    """The `groups` that belong to the explore step of the first one."""
    return [group for group in groups if (group.explorer, group.step) == (groups[0].explorer, groups[0].step)]


STRATEGIES: Registry[type[Strategy]] = Registry("sample strategy")


def take_until(candidates: Sequence[Candidate], rows: int) -> list[Candidate]:
    """The shortest prefix of `candidates` with at least `rows` rows."""
    taken: list[Candidate] = []
    count = 0
    for group in candidates:
        if count >= rows:
            break
        taken.append(group)
        count += group.size
    return taken


@STRATEGIES.register("fifo")
@STRATEGIES.register("default")
@dataclass(frozen=True)
class Fifo(Strategy):
    """Takes groups in order of insertion, each once."""

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """The oldest groups."""
        return Choice(take_until(candidates, rows))


def _priority_fns() -> list[str]:
    return list(PRIORITY_FNS)


@STRATEGIES.register("priority")
@dataclass(frozen=True)
class Priority(Strategy):
    """The highest priority first, by `priority_fn` with its `priority_fn_args`, older insertion first among equals.

    With `reuse_cooldown_time` a group may be taken again that many seconds after it was; without, each is taken once.
    `decay` is that of `linear_decay`. Noise derives from `seed`, the group and the trainer's version.
    """

    reuse_cooldown_time: float | None = None
    decay: float = 2.0
    priority_fn: Annotated[str, Choices(_priority_fns)] = "linear_decay"
    priority_fn_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    function: PriorityFunction = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        decay = {"decay": self.decay} if self.priority_fn == "linear_decay" else {}
        function = PRIORITY_FNS.resolve(self.priority_fn)(**decay | self.priority_fn_args)
        object.__setattr__(self, "function", function)

    @property
    def cooldown(self) -> float | None:
        """`reuse_cooldown_time`."""
        return self.reuse_cooldown_time

    @property
    def use_limit(self) -> int | None:
        """The limit of the priority function."""
        return self.function.use_limit

    @property
    def whole_queue(self) -> bool:
        """True: the newest groups stand at the end."""
        return True

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """The groups of highest priority."""
        noise = np.random.default_rng([self.seed, version]).standard_normal(len(candidates)).tolist()
        priorities = [self.function.priority(group, draw) for group, draw in zip(candidates, noise, strict=True)]
        ranked = sorted(zip(priorities, candidates, strict=True), key=lambda pair: (-pair[0], pair[1].id))
        return Choice(take_until([group for _, group in ranked], rows))


@STRATEGIES.register("staleness_control")
@dataclass(frozen=True)
class StalenessControl(Strategy):
    """Takes groups in order of insertion, without those more than `max_staleness` versions behind."""

    max_staleness: int = 1

    @property
    def whole_queue(self) -> bool:
        """True: a stale group may stand anywhere."""
        return True

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """The oldest groups that are fresh enough, by the oldest version among their tokens."""
        stale = [group for group in candidates if 0 <= group.oldest < version - self.max_staleness]
        gone = {group.id for group in stale}
        return Choice(take_until([group for group in candidates if group.id not in gone], rows), stale)


def _names_within_mix() -> list[str]:
    return [name for name in STRATEGIES if name != "mix"]


@STRATEGIES.register("mix")
@dataclass(frozen=True)
class Mix(Strategy):
    """A share of expert rows in each batch, the rest by `inner` from the rollouts."""

    expert_data_ratio: float = 0.5
    inner: Annotated[Strategy, Choices(_names_within_mix)] = field(default_factory=Fifo)

    def __post_init__(self) -> None:
        if not 0 <= self.expert_data_ratio < 1:
            raise TrinityError(f"expert_data_ratio must be at least 0 and below 1, got {self.expert_data_ratio}")

    @property
    def cooldown(self) -> float | None:
        """The cooldown of `inner`."""
        return self.inner.cooldown

    @property
    def use_limit(self) -> int | None:
        """The limit of `inner`."""
        return self.inner.use_limit

    @property
    def whole_queue(self) -> bool:
        """The choice of `inner`."""
        return self.inner.whole_queue

    @property
    def expert_ratio(self) -> float:
        """`expert_data_ratio`."""
        return self.expert_data_ratio

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """As `inner`; `rows` counts the rollouts alone."""
        return self.inner.choose(candidates, rows, version)


def make_strategy(
    name: str | None, args: dict[str, Any] | None = None, max_staleness: int | None = None,
    replay: Mapping[str, Any] | None = None,
) -> Strategy:  # fmt: skip
    """The strategy of `algorithm.sample_strategy` (with its `_args`).

    With `max_staleness` (`synchronizer.max_staleness`) no older rows are drawn. With `replay` rollouts are drawn by
    priority, and it holds arguments of `Priority` that `args` leaves out. Raises `TrinityError` for an unknown name or
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
