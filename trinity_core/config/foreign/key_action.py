"""What becomes of a key of Trinity-RFT or veRL that is no setting here: one action for each.

A value that asks for nothing (null, and those that an action lists, such as the key's own default) is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Convert = Callable[[Any, Mapping[str, Any]], Any]
"""(value, the section in which it stands) → the value here."""


@dataclass(frozen=True)
class Noted:
    """Accepted without effect; a notice says why."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without a notice, besides null. Without a `why` all are."""
    asked_by: str = ""
    """The sibling key, the key below this one, or the dotted key, that switches it on. While that is off this key says
    nothing."""


@dataclass(frozen=True)
class Imported(Noted):
    """Accepted without effect in `trainer.trainer_config`, which is about training alone.

    `import-verl`, which reads the whole of a veRL run, writes the value at a key here.
    """

    to: str = ""
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Refused:
    """An error that says why, and what to write instead."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without an error, besides null."""


@dataclass(frozen=True)
class Moved:
    """The same setting has another place here: the value goes there."""

    to: tuple[str, ...]
    """Keys below the section in which the old one stands. `../key` counts from one section higher, `/key` from the top
    of the configuration (or stage); `key[].name` is that key of every entry of a list, `*` the old key's own name."""
    unset: tuple[Any, ...] = ()
    """Values that mean "not given", besides null."""
    convert: Convert | None = None
    yields: bool = False
    """The key here wins where both are given; otherwise two different values are an error."""

    @property
    def setting(self) -> str:
        """The key from the top, if the value goes there as it is; else empty."""
        plain = len(self.to) == 1 and not self.unset and self.convert is None and "[]" not in self.to[0]
        return self.to[0].removeprefix("/") if plain and self.to[0].startswith("/") else ""


@dataclass(frozen=True)
class Spelled:
    """A setting that is known here, some of whose values are written otherwise or mean "not given" (None)."""

    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Below:
    """A section that is unknown here, or the arguments of a part."""

    keys: Mapping[str, KeyAction]
    rest: KeyAction | None = None
    """What becomes of the keys not listed; None leaves them to the schema."""


@dataclass(frozen=True)
class Cases:
    """One action for each of some values, and one for all others, which are as they are where the key is known."""

    of: Mapping[Any, KeyAction]
    rest: KeyAction


@dataclass(frozen=True)
class Rewritten:
    """Several settings here: a function of (value, its section) gives their values by key, keys as of `Moved`, or why
    the value is refused.

    A value that it gives None for is not given. The keys here win where both are given.
    """

    keys: Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | Refused | None]
    """None: the value is left to the schema."""
    from_top: bool = False
    """The function gets the whole configuration, or the whole stage with what it inherits, for the section."""


KeyAction = Noted | Refused | Moved | Spelled | Below | Cases | Rewritten
Keys = dict[str, KeyAction]


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


def same(action: KeyAction, names: str) -> Keys:
    """One action for several keys, whose names are separated by spaces; `*` in a target is the key's own name."""
    match action:
        case Moved(to=to):
            return {name: replace(action, to=tuple(key.replace("*", name) for key in to)) for name in names.split()}
        case Imported(to=key):
            return {name: replace(action, to=key.replace("*", name)) for name in names.split()}
    return dict.fromkeys(names.split(), action)


def keys(*parts: Mapping[str, KeyAction]) -> Keys:
    """One section of several parts. Raises ValueError if a key stands in two of them."""
    joined: Keys = {}
    for part in parts:
        if twice := joined.keys() & part.keys():
            raise ValueError(f"in the table of foreign keys twice: {', '.join(sorted(twice))}")
        joined |= part
    return joined


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """True if this is one of the values; a flag is no number."""
    return any(type(value) is type(other) and value == other for other in values)


FOLLOWS = noted("It follows from other settings.", "", 0, 1, -1, False, True, {}, [])
"""Keys that Trinity-RFT or veRL fill themselves."""
SILENT = Noted("")
"""Accepted without effect and without a notice: it says nothing about the run."""
