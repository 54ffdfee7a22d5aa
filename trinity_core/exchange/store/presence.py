"""Who takes part in a run, who is waited for, and when a run is over: rules without a clock or a database.

What each process announces; the store keeps it (`members.py`) and dates it by its own clock:

| process | announces | by methods of the store |
| --- | --- | --- |
| run of an explorer, of a trainer | it will be started (again) | `expect`, `expect_trainer` |
| explorer (also one that serves) | begun; waits; finished; left | `join`, `mark_waiting`, `mark_finished`, `leave` |
| trainer | begun; ended, because no more experiences come | `begin`, `mark_ended` |
| both, every `SEEN_SECONDS` | alive; an explorer is lost after `LOST_SECONDS` without it | `mark_seen` |

Who waits for whom. After the time limit, the error names the members and when they were last seen:

| who | waits for | until | limit |
| --- | --- | --- | --- |
| trainer | all explorers; if some have left, the others | each has finished or needs new weights | `max_read_timeout` |
| explorer | the trainer: a version, its turn to begin a step | it has finished or went back | `sync_timeout` |

The trainer has finished when a checkpoint holds its last step or it has ended, unless it is expected again. A rewind,
or a trainer with more steps, makes it unfinished.

A run becomes longer when its explorers and its trainer are given more steps, in any order. Their step counts are not
comparable (epochs, several explorers), so each explorer's `Length` records which side has been given more since the two
last agreed.

| | level | ahead | behind | ahead and behind |
| --- | --- | --- | --- | --- |
| the explorer begins with more | ahead | ahead | ahead and behind | ahead and behind |
| … with as many | level | ahead | behind | ahead and behind |
| … with fewer | level | level | behind | behind |
| the trainer begins with more | behind | level | behind | behind |
| after each of these, if the trainer is active | level | ahead | behind | level |

An explorer that falls behind is waited for until it reports again that it has finished. An explorer with more steps
than when the trainer was last active keeps exploring, although the trainer has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

SEEN_SECONDS = 10.0
"""Interval at which a process reports that it is alive."""
LOST_SECONDS = 60.0
"""An explorer not seen for this long counts as lost: others that wait to begin a step ignore its step."""


@dataclass(frozen=True)
class TrainerPresence:
    """The trainer's state in the store."""

    lineage: int
    committed: int
    total: int | None = None
    """Total number of train steps; None: no trainer has begun."""
    seen: float | None = None
    """Unix seconds when it was last seen; None: never."""
    expected: bool = False
    """True if it is about to begin again, perhaps with more steps."""
    ended: bool = False
    """True if it ended before its last step because no more experiences came."""

    @property
    def finished(self) -> bool:
        """True if it will not train any more: a checkpoint holds its last step, or it has ended before that."""
        return not self.expected and self.total is not None and (self.ended or self.committed >= self.total)

    def describe(self, now: float) -> str:
        """Describe the trainer in logs: `trainer with a checkpoint of step 4 of 20, last seen 12 s ago`."""
        if self.seen is None:
            return "no trainer has been seen yet"
        return f"trainer with a checkpoint of step {self.committed}{_of(self.total)}, {_seen(self.seen, now)}"


@dataclass(frozen=True)
class Length:
    """The length of an explorer's run (`total_steps`, or its explore steps), and whether the trainer agrees with it."""

    agreed: int | None = None
    """Length while the trainer was last active, or when the explorer first began; None: not known yet."""
    announced: int | None = None
    """A greater length, for which the trainer needs more steps: the explorer is ahead."""
    is_behind: bool = False
    """True if the trainer was given more steps, and the explorer was not yet."""

    def explorer_begins(self, length: int, trainer_at_work: bool) -> Length:
        """Return the length after the explorer begins with a run of that `length`."""
        if self.agreed is None:
            return Length(length)
        has_more = length > self.agreed or (self.announced is not None and length >= self.announced)
        after = replace(self, announced=length if has_more else None)
        return after._met(length) if trainer_at_work else after

    def trainer_begins(self, has_more: bool, trainer_at_work: bool) -> Length:
        """Return the length after the trainer begins; `has_more`: with more steps than before."""
        was_ahead = self.announced is not None and not self.is_behind
        after = replace(self, announced=None, is_behind=not was_ahead) if has_more else self
        return after._met(self.announced or self.agreed) if trainer_at_work else after

    def _met(self, length: int | None) -> Length:
        answered = self.is_behind and self.announced is not None
        return Length(length) if answered else replace(self, agreed=length)

    def outlasts(self, length: int) -> bool:
        """True if a run of `length` is longer than it was while the trainer was active."""
        return self.agreed is not None and length > self.agreed


@dataclass(frozen=True)
class ExplorerPresence:
    """An explorer's state in the store."""

    waiting: int | None = None
    finished: bool = False
    left: bool = False
    seen: float | None = None
    total: int | None = None
    step: int = 0
    empty_steps: int = 0
    """Number of its most recent steps without a row."""
    begun: tuple[int, int] | None = None
    """Rows and version of the step in progress, where explorers share a bound on staleness."""

    @property
    def is_expected(self) -> bool:
        """True if it has steps left: it has neither finished nor left."""
        return not self.finished and not self.left

    def is_lost(self, now: float) -> bool:
        """True if it has been seen, but not recently. A time far in the future predates a clock that was set back."""
        return self.seen is not None and abs(now - self.seen) >= LOST_SECONDS

    def is_at_work(self, now: float) -> bool:
        """True if it has steps left and has been seen recently."""
        return self.is_expected and self.seen is not None and not self.is_lost(now)

    def describe(self, now: float) -> str:
        """Describe the explorer in logs: `step 12 of 60, last seen 3 s ago`."""
        parts = [f"step {self.step}{_of(self.total)}"]
        if self.empty_steps:
            parts.append(f"no experience left of its last {self.empty_steps} steps")
        if not self.is_expected:
            return ", ".join([*parts, "finished" if self.finished else "left"])
        if self.waiting is not None:
            parts.append(f"waits for version {self.waiting}")
        return ", ".join([*parts, _seen(self.seen, now)])


Explorers = Mapping[str, ExplorerPresence]


def all_have_finished(explorers: Explorers) -> bool:
    """True if every explorer has finished. Explorers that left are ignored unless all have."""
    present = [explorer for explorer in explorers.values() if not explorer.left]
    return bool(present) and all(explorer.finished for explorer in present)


def nothing_more_comes(explorers: Explorers, newest_version: int, now: float) -> bool:
    """True if every explorer has finished or waits for weights that need a further train step.

    If at least one explorer waits this way, lost ones are ignored: they may come back, but not before it continues.
    Explorers that left are ignored unless all have.
    """
    present = {name: explorer for name, explorer in explorers.items() if not explorer.left}
    waits = {name for name, state in present.items() if state.waiting is not None and state.waiting > newest_version}
    lost = {name for name, explorer in present.items() if explorer.is_lost(now)}
    ignored = waits | lost if waits - lost else waits
    return bool(present) and all(explorer.finished or name in ignored for name, explorer in present.items())


def begun_by_others(explorers: Explorers, name: str, now: float) -> list[tuple[int, int]]:
    """Return rows and version of the steps begun by explorers other than `name`, without lost ones."""
    others = [explorer for other, explorer in explorers.items() if other != name and not explorer.is_lost(now)]
    return [explorer.begun for explorer in others if explorer.begun is not None]


@dataclass(frozen=True)
class Turn:
    """A step that waits to begin, where explorers share a bound on staleness."""

    since: float
    rows: int


def rows_of_earlier(turns: Mapping[str, Turn], explorers: Explorers, name: str, now: float) -> list[int]:
    """Return the rows of each step that has waited longer than the one of explorer `name`, without lost explorers."""
    mine = (turns[name].since if name in turns else now, name)
    return [
        turn.rows
        for other, turn in turns.items()
        if (turn.since, other) < mine and (explorer := explorers.get(other)) is not None
        and explorer.waiting is not None and explorer.begun is None and explorer.is_expected
        and not explorer.is_lost(now)
    ]  # fmt: skip


def all_is_dropped(explorers: Explorers, before: Mapping[str, int], now: float) -> bool:
    """True if explorers are active, and each has put steps since `before` (name → step), the last ones without a row.

    Waiting is then pointless. A lost explorer, or one in the middle of a long step, may still bring rows.
    """
    expected = {name: explorer for name, explorer in explorers.items() if explorer.is_expected}
    return bool(expected) and all(
        explorer.empty_steps and explorer.step > before.get(name, 0) and explorer.is_at_work(now)
        for name, explorer in expected.items()
    )


def describe_explorers(explorers: Explorers, now: float) -> str:
    """Describe all explorers in logs: `explorers known: explorer (step 12 of 60, last seen 3 s ago)`."""
    if not explorers:
        return "no explorer is ready yet"
    return "explorers known: " + ", ".join(
        f"{name} ({explorer.describe(now)})" for name, explorer in sorted(explorers.items())
    )


def _of(total: int | None) -> str:
    return "" if total is None else f" of {total}"


def _seen(seen: float | None, now: float) -> str:
    return "not started yet" if seen is None else f"last seen {max(0.0, now - seen):.0f} s ago"
