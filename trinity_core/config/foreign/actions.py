"""What becomes of a key of Trinity-RFT or veRL that is not a setting here, or of a value that is none here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OFF: tuple[Any, ...] = (None, "", False, 0, 0.0, -1, [], {})
"""Values that request nothing; a key without a counterpart may have them."""


@dataclass(frozen=True)
class Refusal:
    why: str = ""
    """What does not go together; "" for a key or value that has no counterpart."""


@dataclass(frozen=True)
class Dropped:
    """Has no counterpart: accepted with a notice, or refused."""

    default: tuple[Any, ...] = ()
    """Values besides `OFF` that ask for what is done anyway, such as the other system's default. If true does, false
    does not."""
    refused: bool = False
    is_told: bool = True
    """False for a key that does not matter for the run, or that another key reads."""

    def requests_nothing(self, value: Any) -> bool:
        if not self.is_told or is_among(value, self.default):
            return True
        return is_among(value, OFF) and not (value is False and is_among(True, self.default))


@dataclass(frozen=True)
class Moved:
    """Has another place here."""

    to: tuple[str, ...]
    """Target keys relative to the section of the old key. `../key` starts one section higher, `/key` at the top of the
    configuration (or stage); `key[].name` is that key of every entry of a list, `*` the old key's own name."""
    unset: tuple[Any, ...] = ()
    """Values that mean "not given", besides null."""
    convert: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """(value, its section) → value here; None if it means "not given", or a `Refusal`."""
    yields: bool = False
    """True if the target key wins if both are given; otherwise two different values are an error."""

    def keys(self, value: Any, section: Mapping[str, Any], *_: Any) -> Mapping[str, Any] | Refusal:
        """Return the value by target key, as `Rewritten.keys` does; {} if it means "not given"."""
        is_given = value is not None and not is_among(value, self.unset)
        converted = self.convert(value, section) if self.convert and is_given else value
        if isinstance(converted, Refusal):
            return converted
        return dict.fromkeys(self.to, converted) if is_given and converted is not None else {}

    @property
    def setting(self) -> str:
        """The absolute target key if the value moves there unchanged; else ""."""
        plain = len(self.to) == 1 and not self.unset and self.convert is None and "[]" not in self.to[0]
        return self.to[0].removeprefix("/") if plain and self.to[0].startswith("/") else ""


@dataclass(frozen=True)
class Rewritten:
    """Becomes several settings.

    The function gets the value, its section and the whole configuration (or stage), both with inherited values. It
    returns values by key as in `Moved`, which yield to existing ones; a `Refusal`; or None to leave the value as it is.
    """

    keys: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any] | Refusal | None]
    of_null: bool = False
    """True if the function is asked about null, too."""
    yields = True


@dataclass(frozen=True)
class Below:
    """A section unknown here, or the arguments of a part."""

    keys: Mapping[str, Action]
    rest: Dropped | Moved | None = None
    """Action for unlisted keys; a `Dropped` takes them together. None leaves them to the schema."""


Action = Dropped | Moved | Rewritten | Below
Keys = dict[str, Action]
SILENT = Dropped(is_told=False)


def noted(names: str, *default: Any) -> Keys:
    """Return keys, separated by spaces, that are accepted without effect."""
    return dict.fromkeys(names.split(), Dropped(default))


def refused(names: str, *default: Any) -> Keys:
    return dict.fromkeys(names.split(), Dropped(default, refused=True))


def silent(names: str) -> Keys:
    return dict.fromkeys(names.split(), SILENT)


def moved(names: str, *to: str, **options: Any) -> Keys:
    """Return keys that move; `options` are those of `Moved`."""
    return {name: Moved(tuple(key.replace("*", name) for key in to), **options) for name in names.split()}


def spelled(values: Mapping[Any, Any]) -> Rewritten:
    """Return the action for a known setting of which null, and values that map to None, mean "not given", and others
    are called otherwise or refused."""

    def keys(value: Any, *_: Any) -> Mapping[str, Any] | Refusal | None:
        other = next((new for old, new in values.items() if is_among(value, (old,))), None)
        if other is None and value is not None and not is_among(value, values):
            return None
        return other if isinstance(other, Refusal) else {} if other is None else {"*": other}

    return Rewritten(keys, of_null=True)


def unset(names: str, *values: Any) -> Keys:
    """Return known settings for which null and these values mean "not given"."""
    return dict.fromkeys(names.split(), spelled(dict.fromkeys(values)))


def switched(names: str, *default: Any, by: str = "enable") -> Keys:
    """Return sections that only matter if their key `by` is on."""
    return dict.fromkeys(names.split(), Below({by: Dropped(default, True)}, SILENT))


def is_among(value: Any, values: Iterable[Any]) -> bool:
    """True if `value` is one of `values`; bools do not equal numbers."""
    return any(type(value) is type(other) and value == other for other in values)
