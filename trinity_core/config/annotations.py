"""Types taken apart: what the messages, the reference page and the schema say of a setting's type."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel

from trinity_core.config.types import SameAs


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, both inclusive unless `exclusive` (then `low` itself is refused)."""

    low: float | None = None
    high: float | None = None
    exclusive: bool = False

    def __str__(self) -> str:
        lower = "" if self.low is None else f"{'more than' if self.exclusive else 'at least'} {_written(self.low)}"
        upper = "" if self.high is None else f"at most {_written(self.high)}"
        return " and ".join(part for part in (lower, upper) if part)


def _written(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True)
class Type:
    """A setting's type, taken apart."""

    plain: Any
    """The type without annotations and without null."""
    extras: tuple[Any, ...]
    """The annotations, outermost last."""
    optional: bool
    """True for `T | None`."""

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of a number; None if it has none."""
        low: list[tuple[Any, bool]] = [(extra.ge, False) for extra in self.extras if isinstance(extra, Ge)]
        low += [(extra.gt, True) for extra in self.extras if isinstance(extra, Gt)]
        high: list[Any] = [extra.le for extra in self.extras if isinstance(extra, Le)]
        if not low and not high:
            return None
        least, exclusive = low[-1] if low else (None, False)
        return Bounds(least, high[-1] if high else None, exclusive)

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that a choice, or an entry of a list of choices, may have."""
        plain = (self.entry or self).plain
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a section, of the entries of a list of sections, or of those of sections by name."""
        found = self.entry.plain if self.entry else self.plain
        return found if isinstance(found, type) and issubclass(found, BaseModel) else None

    @property
    def entry(self) -> Type | None:
        """The type of the entries of a list of any length, or of those by name; None for any other type."""
        args, origin = get_args(self.plain), get_origin(self.plain)
        named, listed = origin is dict, origin is tuple and args[-1] is Ellipsis
        return type_of(args[1] if named else args[0]) if named or listed else None


def type_of(annotation: Any) -> Type:
    """Take an annotation apart."""
    plain, optional = annotation, False
    extras: tuple[Any, ...] = ()
    while True:
        if get_origin(plain) is Annotated:
            plain, *found = get_args(plain)
            extras = (*found, *extras)
        elif get_origin(plain) in (types.UnionType, Union):
            (plain,) = (option for option in get_args(plain) if option is not type(None))
            optional = True
        else:
            break
    spelled = next((extra for extra in extras if isinstance(extra, SameAs)), None)
    if spelled is not None and plain is Any:
        native = type_of(spelled.annotation)
        return Type(native.plain, (*native.extras, *extras), True)
    return Type(plain, extras, optional)


@functools.cache
def types_of(cls: type[BaseModel]) -> dict[str, Type]:
    """The type of each setting of a section."""
    return {name: type_of(field.rebuild_annotation()) for name, field in cls.model_fields.items()}


def type_at(cls: type[BaseModel], path: Sequence[str | int]) -> Type | None:
    """The type of the value at a path below a section; None where no setting is."""
    found: Type | None = Type(cls, (), False)
    for part in path:
        if found is None:
            return None
        if isinstance(found.plain, type) and issubclass(found.plain, BaseModel):
            found = types_of(found.plain).get(str(part))
        elif found.entry is None and isinstance(part, int) and part < len(get_args(found.plain)):
            found = type_of(get_args(found.plain)[part])
        else:
            found = found.entry
    return found
