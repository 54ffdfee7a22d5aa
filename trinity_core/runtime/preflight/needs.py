"""Memory or disk as a sum of needs, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Need:
    """One item of memory or disk."""

    what: str
    bytes: int
    why: str
    """How the number is computed, such as `33,571,328 parameters × 4 bytes`."""
    spared: bool = False
    """True for memory that is used only if it is free."""


def total(needs: Iterable[Need]) -> int:
    return sum(need.bytes for need in needs)


def least(needs: Iterable[Need]) -> int:
    """Return the bytes of the needs that cannot be spared."""
    return sum(need.bytes for need in needs if not need.spared)


def nonzero(needs: Iterable[Need]) -> tuple[Need, ...]:
    return tuple(need for need in needs if need.bytes)


def size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}" if unit < 2 else f"{count:.3g} {UNITS[unit]}"
