"""Which groups make the next batch: pure functions of the stored facts of each group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from trinity_core.errors import TrinityError
from trinity_core.registry import Registry
from trinity_core.signatures import Choices


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that may be taken."""

    id: int
    """Ascending in order of insertion."""
    size: int
    """Rows."""
    newest: int
    """The newest policy version among its tokens; -1: none (given data)."""
    oldest: int
    """The oldest one."""
    uses: int = 0
    """Trainer steps that have used it."""


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
    """In order of insertion, each group once."""

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """The oldest groups."""
        return Choice(take_until(candidates, rows))


@STRATEGIES.register("priority")
@dataclass(frozen=True)
class Priority(Strategy):
    """The highest `newest version - decay * uses` first, older insertion first among equals.

    With `reuse_cooldown_time` a group may be taken again that many seconds after it was; without, each is taken once.
    """

    reuse_cooldown_time: float | None = None
    decay: float = 2.0

    @property
    def cooldown(self) -> float | None:
        """`reuse_cooldown_time`."""
        return self.reuse_cooldown_time

    @property
    def whole_queue(self) -> bool:
        """True: the newest groups stand at the end."""
        return True

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """The groups of highest priority."""
        ranked = sorted(candidates, key=lambda group: (-(group.newest - self.decay * group.uses), group.id))
        return Choice(take_until(ranked, rows))


@STRATEGIES.register("staleness_control")
@dataclass(frozen=True)
class StalenessControl(Strategy):
    """In order of insertion, without groups more than `max_staleness` versions behind."""

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
        """That of `inner`."""
        return self.inner.cooldown

    @property
    def whole_queue(self) -> bool:
        """That of `inner`."""
        return self.inner.whole_queue

    @property
    def expert_ratio(self) -> float:
        """`expert_data_ratio`."""
        return self.expert_data_ratio

    def choose(self, candidates: Sequence[Candidate], rows: int, version: int) -> Choice:
        """As `inner`; `rows` counts the rollouts alone."""
        return self.inner.choose(candidates, rows, version)


def make_strategy(
    name: str | None, args: dict[str, Any] | None = None, use_priority_queue: bool = False,
    reuse_cooldown_time: float | None = None, max_staleness: int | None = None,
) -> Strategy:  # fmt: skip
    """The strategy of `algorithm.sample_strategy` (with its `_args`) over a queue with the buffer's options.

    With `max_staleness` (`synchronizer.max_staleness`) no older rows are drawn. Raises `TrinityError` for an unknown
    name or argument.
    """
    args = dict(args or {})
    name = name or "default"
    try:
        if name == "mix":
            ratio = {"expert_data_ratio": args.pop("expert_data_ratio")} if "expert_data_ratio" in args else {}
            inner = make_strategy(args.pop("inner", None), args, use_priority_queue, reuse_cooldown_time, max_staleness)
            return Mix(**ratio, inner=inner)
        if name in ("default", "fifo") and use_priority_queue:
            name = "priority"
        if max_staleness is not None:
            name = "staleness_control" if name in ("default", "fifo") else name
            args.setdefault("max_staleness", max_staleness)
        if name == "priority" and reuse_cooldown_time is not None:
            args.setdefault("reuse_cooldown_time", reuse_cooldown_time)
        made = STRATEGIES.resolve(name)(**args)
    except TypeError as error:
        raise TrinityError(f"sample_strategy_args of {name!r} do not fit: {error}") from error
    return made
