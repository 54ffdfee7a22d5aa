"""The words settings are typed with: what a value may be, its unit, and where it comes from when it is left out.

A setting's type carries everything that can be said about it alone (choices are a `Literal`, bounds a `Range`), so that
checking, the reference page and forms are derived from one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both inclusive unless `exclusive` (then `low` itself is refused)."""

    low: float | None = None
    high: float | None = None
    exclusive: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies within."""
        if self.low is not None and (value <= self.low if self.exclusive else value < self.low):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        lower = "" if self.low is None else f"{'more than' if self.exclusive else 'at least'} {_written(self.low)}"
        upper = "" if self.high is None else f"at most {_written(self.high)}"
        return " and ".join(part for part in (lower, upper) if part)


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class Unit:
    """What one of a number counts: tokens, steps, seconds."""

    name: str


@dataclass(frozen=True)
class SameAs:
    """Another spelling of the native setting at this key; the native one wins where both are given."""

    key: str


@dataclass(frozen=True)
class _Derived:
    """Left out or null, the setting is filled by `resolve`."""


@dataclass(frozen=True)
class _NoEffect:
    """Accepted so that existing files load; nothing reads it."""


@dataclass(frozen=True)
class _Hidden:
    """Not a setting: never read from or written to YAML."""


IS_DERIVED, IS_NO_EFFECT, IS_HIDDEN = _Derived(), _NoEffect(), _Hidden()

Derived = Annotated[T, IS_DERIVED]
"""A setting whose default follows from others. Its value is of type T once a configuration is resolved."""
DERIVED: Any = None
"""The default of a `Derived` setting."""
NoEffect = Annotated[Any, IS_NO_EFFECT]

Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, exclusive=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Tokens = Annotated[int, Range(1), Unit("tokens")]
Steps = Annotated[int, Range(1), Unit("steps")]
StepsOrNone = Annotated[int, Range(0), Unit("steps")]
Seconds = Annotated[float, Range(0, exclusive=True), Unit("seconds")]
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""What every random generator takes: numpy's, torch's, vLLM's."""
Args = dict[str, Any]
