"""What becomes of a key of Trinity-RFT or veRL that is no setting here: one verdict for each.

A value that asks for nothing (null, and those that a verdict lists, such as the key's own default) is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any, Mapping[str, Any]], Any]
"""(value, the section in which it stands) → the value here."""


@dataclass(frozen=True)
class Noted:
    """Accepted without effect; a notice says why."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without a notice, beside null. Without a `why` all are."""


@dataclass(frozen=True)
class Refused:
    """An error that says why, and what to write instead."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without an error, beside null."""


@dataclass(frozen=True)
class Moved:
    """The same setting has another place here: the value goes there."""

    to: tuple[str, ...]
    """Keys below the section in which the old one stands. `../key` counts from one section higher, `/key` from the top
    of the configuration (or stage); `key[].name` is that key of every entry of a list, `*` the old key's own name."""
    unset: tuple[Any, ...] = ()
    """Values that mean "not given", beside null."""
    convert: Convert | None = None
    yields: bool = False
    """The key here wins where both are given; otherwise two different values are an error."""


@dataclass(frozen=True)
class Spelled:
    """A setting that is known here, some of whose values are written otherwise or mean "not given" (None)."""

    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Below:
    """A section that is unknown here, or the arguments of a part."""

    keys: Mapping[str, Verdict]
    rest: Verdict | None = None
    """Verdict on the keys not listed; None leaves them to the schema."""


@dataclass(frozen=True)
class Cases:
    """One verdict for each of some values, and one for all others, which are as they are where the key is known."""

    of: Mapping[Any, Verdict]
    rest: Verdict


@dataclass(frozen=True)
class Rewritten:
    """Several settings here: a function of (value, its section) gives their values by key, keys as of `Moved`.

    A value that it gives None for is not given. The keys here win where both are given.
    """

    keys: Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | None]
    """None: the value is left to the schema."""


Verdict = Noted | Refused | Moved | Spelled | Below | Cases | Rewritten
Keys = dict[str, Verdict]


def noted(why: str, *harmless: Any) -> Noted:
    """Accepted without effect."""
    return Noted(why, harmless)


def refused(why: str, *harmless: Any) -> Refused:
    """Refused, but for these values and null."""
    return Refused(why, harmless)


def moved(*to: str, unset: tuple[Any, ...] = (), convert: Convert | None = None, yields: bool = False) -> Moved:
    """Written elsewhere here."""
    return Moved(to, unset, convert, yields)


def unset(*values: Any) -> Spelled:
    """A known setting for which these values mean "not given"."""
    return Spelled(dict.fromkeys(values))


FOLLOWS = noted("It follows from other settings.", "", 0, 1, -1, False, True, {}, [])
"""Keys that Trinity-RFT or veRL fill themselves."""
SILENT = Noted("")
"""Accepted without effect and without a notice: it says nothing about the run."""
