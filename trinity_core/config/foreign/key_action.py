"""The action for a key of Trinity-RFT or veRL that is not a setting here.

Values that request nothing (null, and those listed in an action, such as the key's own default) are dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Noted:
    """Accepted without effect, with a notice."""

    harmless: tuple[Any, ...] = ()
    """Values that are dropped without a notice, besides null."""
    is_told: bool = True
    """False for a key that does not matter for the run."""


@dataclass(frozen=True)
class Refused:
    """An error."""

    harmless: tuple[Any, ...] = ()
    """Values that are dropped without an error, besides null."""
    why: str = ""
    """What does not go together; "" for a key or value that has no counterpart."""


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

SILENT = Noted(is_told=False)
"""Accepted without effect and without a notice."""


def noted(names: str, *harmless: Any) -> Keys:
    """Return keys, separated by spaces, that are accepted without effect."""
    return dict.fromkeys(names.split(), Noted(harmless))


def refused(names: str, *harmless: Any) -> Keys:
    """Return keys of which all values except these and null are errors."""
    return dict.fromkeys(names.split(), Refused(harmless))


def silent(names: str) -> Keys:
    return dict.fromkeys(names.split(), SILENT)


def follows(names: str) -> Keys:
    """Return keys that Trinity-RFT or veRL fill in themselves."""
    return noted(names, "", 0, 1, -1, False, True, {}, [])


def moved(
    names: str, *to: str, unset: tuple[Any, ...] = (), convert: Convert | None = None, yields: bool = False
) -> Keys:
    """Return keys that move; `*` in a target is the key's own name."""
    return {name: Moved(tuple(key.replace("*", name) for key in to), unset, convert, yields) for name in names.split()}


def unset(names: str, *values: Any) -> Keys:
    """Return known settings for which these values mean "not given"."""
    return dict.fromkeys(names.split(), Spelled(dict.fromkeys(values)))


def disabled(names: str, *off: Any, switch: str = "enable") -> Keys:
    """Return sections whose key `switch` must be off."""
    return dict.fromkeys(names.split(), Below(refused(switch, *(off or (False,))), SILENT))


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """True if `value` is one of `values`; bools do not equal numbers."""
    return any(type(value) is type(other) and value == other for other in values)
