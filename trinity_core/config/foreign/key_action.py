"""The action for a key of Trinity-RFT or veRL that is not a setting here.

Values that request nothing (null, and those listed in an action, such as the key's own default) are dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Convert = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Noted:
    """Accepted without effect; a notice gives the reason."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without a notice, besides null. Without a `why` all are."""
    asked_by: str = ""
    """The sibling key, the key below this one, or the dotted key that enables it. While that is off, this key has no
    effect anyway."""


@dataclass(frozen=True)
class Imported(Noted):
    """Accepted without effect in `trainer.trainer_config`, which only concerns training.

    `import-verl`, which reads a whole veRL run, writes the value to a key here.
    """

    to: str = ""
    convert: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Refused:
    """An error with the reason, and what to write instead."""

    why: str
    harmless: tuple[Any, ...] = ()
    """Values that are dropped without an error, besides null."""


@dataclass(frozen=True)
class Moved:
    """A setting that has another place here; the value moves there."""

    to: tuple[str, ...]
    """Target keys relative to the section of the old key. `../key` starts one section higher, `/key` at the top of the
    configuration (or stage); `key[].name` is that key of every entry of a list, `*` the old key's own name."""
    unset: tuple[Any, ...] = ()
    """Values that mean "not given", besides null."""
    convert: Convert | None = None
    yields: bool = False
    """True if the target key wins if both are given; otherwise two different values are an error."""

    @property
    def setting(self) -> str:
        """The absolute target key if the value moves there unchanged; else ""."""
        plain = len(self.to) == 1 and not self.unset and self.convert is None and "[]" not in self.to[0]
        return self.to[0].removeprefix("/") if plain and self.to[0].startswith("/") else ""


@dataclass(frozen=True)
class Spelled:
    """A setting known here, some of whose values are spelled differently or mean "not given" (None)."""

    values: Mapping[Any, Any]


@dataclass(frozen=True)
class Below:
    """A section unknown here, or the arguments of a part."""

    keys: Mapping[str, KeyAction]
    rest: KeyAction | None = None
    """Action for unlisted keys; None leaves them to the schema."""


@dataclass(frozen=True)
class Cases:
    """One action for each of some values, and one for all others. Known keys keep other values unchanged."""

    of: Mapping[Any, KeyAction]
    rest: KeyAction


@dataclass(frozen=True)
class Rewritten:
    """A key that becomes several settings. A function of (value, its section) returns their values by key, keys as in
    `Moved`, or why the value is refused.

    Values of None are not given. Existing keys win.
    """

    keys: Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | Refused | None]
    """A result of None leaves the value to the schema."""
    from_top: bool = False
    """True if the function gets the whole configuration, or the whole stage with inherited values, as the section."""


KeyAction = Noted | Refused | Moved | Spelled | Below | Cases | Rewritten
Keys = dict[str, KeyAction]


def noted(why: str, *harmless: Any) -> Noted:
    return Noted(why, harmless)


def refused(why: str, *harmless: Any) -> Refused:
    """Refuse all values except these and null."""
    return Refused(why, harmless)


def moved(*to: str, unset: tuple[Any, ...] = (), convert: Convert | None = None, yields: bool = False) -> Moved:
    return Moved(to, unset, convert, yields)


def unset(*values: Any) -> Spelled:
    """A known setting for which these values mean "not given"."""
    return Spelled(dict.fromkeys(values))


def same(action: KeyAction, names: str) -> Keys:
    """Apply one action to several keys, separated by spaces; `*` in a target is the key's own name."""
    match action:
        case Moved(to=to):
            return {name: replace(action, to=tuple(key.replace("*", name) for key in to)) for name in names.split()}
        case Imported(to=key):
            return {name: replace(action, to=key.replace("*", name)) for name in names.split()}
    return dict.fromkeys(names.split(), action)


def keys(*parts: Mapping[str, KeyAction]) -> Keys:
    """Join the parts of a section. Raises ValueError if a key occurs twice."""
    joined: Keys = {}
    for part in parts:
        if twice := joined.keys() & part.keys():
            raise ValueError(f"in the table of foreign keys twice: {', '.join(sorted(twice))}")
        joined |= part
    return joined


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """True if `value` is one of `values`; bools do not equal numbers."""
    return any(type(value) is type(other) and value == other for other in values)


FOLLOWS = noted("It follows from other settings.", "", 0, 1, -1, False, True, {}, [])
"""Keys that Trinity-RFT or veRL fill in themselves."""
SILENT = Noted("")
"""Accepted without effect and without a notice: the key does not matter for the run."""
