"""Describes each setting from the models: type, bounds, default and doc, for messages, the reference page and generated
tests."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trinity_core.base.registry import registry_of
from trinity_core.config.algorithm_types import PARTS
from trinity_core.config.schema import AlgorithmConfig, Config, MonitorConfig, ReplayBufferConfig, StageConfig
from trinity_core.config.types import IS_DERIVED, Listed, OneOrMany, Unit


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, both inclusive unless `above` (then `low` itself is refused) or `below` (`high` itself)."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False

    def __str__(self) -> str:
        lower = "" if self.low is None else f"{'more than' if self.above else 'at least'} {_written(self.low)}"
        upper = "" if self.high is None else f"{'less than' if self.below else 'at most'} {_written(self.high)}"
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
        low: list[tuple[Any, bool]] = [(extra.ge, False) for extra in self.extras if isinstance(extra, Ge)]
        low += [(extra.gt, True) for extra in self.extras if isinstance(extra, Gt)]
        high: list[tuple[Any, bool]] = [(extra.le, False) for extra in self.extras if isinstance(extra, Le)]
        high += [(extra.lt, True) for extra in self.extras if isinstance(extra, Lt)]
        if not low and not high:
            return None
        (least, above), (most, below) = low[-1] if low else (None, False), high[-1] if high else (None, False)
        return Bounds(least, most, above, below)

    @property
    def choices(self) -> tuple[str, ...]:
        """All possible values of a choice, or of an entry in a list of choices."""
        plain = (self.entry or self).plain
        return get_args(plain) if get_origin(plain) is Literal else ()

    @property
    def takes_text_or_list(self) -> bool:
        """True for a text, or names, that may be a single value or a list."""
        return any(isinstance(extra, OneOrMany | Listed) for extra in self.extras)

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a section, or of the entries in a list or mapping of sections."""
        candidate = self.entry.plain if self.entry else self.plain
        return candidate if isinstance(candidate, type) and issubclass(candidate, BaseModel) else None

    @property
    def entry(self) -> Type | None:
        """The type of the entries in a list of any length or a mapping; None for other types."""
        args, origin = get_args(self.plain), get_origin(self.plain)
        is_dict, is_list = origin is dict, origin is list or (origin is tuple and args[-1] is Ellipsis)
        return type_of(args[1] if is_dict else args[0]) if is_dict or is_list else None

    @property
    def entry_key(self) -> str:
        """Suffix of an entry's key after the setting's key: `[i]` or `.NAME`; "" for types without entries."""
        return "" if self.entry is None else ".NAME" if get_origin(self.plain) is dict else "[i]"


def type_of(annotation: Any) -> Type:
    plain, optional = annotation, False
    extras: tuple[Any, ...] = ()
    while True:
        if get_origin(plain) is Annotated:
            plain, *metadata = get_args(plain)
            extras = (*metadata, *extras)
        elif options := _options(plain):
            plain, optional = options[0], True
        else:
            break
    return Type(plain, extras, optional)


def _options(kind: Any) -> list[Any]:
    """Return the T of `T | None`; nothing for other types."""
    options = [option for option in get_args(kind) if option is not type(None)]
    is_union = get_origin(kind) in (types.UnionType, Union)
    return options if is_union and len(options) == 1 else []


@functools.cache
def types_of(cls: type[BaseModel]) -> dict[str, Type]:
    return {name: type_of(field.rebuild_annotation()) for name, field in cls.model_fields.items()}


def type_below(typed: Type | None, part: str | int) -> Type | None:
    """Return the type of an entry of a value; None if there is no such setting. A stage has the sections of a
    configuration."""
    if typed is None:
        return None
    if isinstance(typed.plain, type) and issubclass(typed.plain, BaseModel):
        whole = types_of(Config) if typed.plain is StageConfig else {}
        return (types_of(typed.plain) | whole).get(str(part))
    if typed.entry is None and isinstance(part, int) and part < len(get_args(typed.plain)):
        return type_of(get_args(typed.plain)[part])
    return typed.entry


def type_at(cls: type[BaseModel], path: Sequence[str | int]) -> Type | None:
    """Return the type of the value at a path below a section; None if there is no such setting."""
    typed: Type | None = Type(cls, (), False)
    for part in path:
        typed = type_below(typed, part)
    return typed


Kind = Literal["integer", "number", "boolean", "string", "array", "object"]
_KINDS: dict[Any, Kind] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    tuple: "array",
    Literal: "string",
}


@dataclass(frozen=True)
class Setting(Type):
    """One key of a section. If it is `optional`, null is a value of its own."""

    name: str
    doc: str
    kind: Kind
    default: Any
    """Default of a plain value; None if it is derived, or if the setting may be left empty."""
    names: tuple[str, ...] = ()
    """The built-in names; modules in `plugin_dir` may add more."""

    @property
    def derived(self) -> bool:
        return IS_DERIVED in self.extras

    @property
    def unit(self) -> str:
        return next((extra.name for extra in self.extras if isinstance(extra, Unit)), "")


def settings(cls: type[BaseModel]) -> list[Setting]:
    return [_setting(cls, name) for name in cls.model_fields]


def sections(cls: type[BaseModel] = Config, key: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield key, cls
    for name, kind in types_of(cls).items():
        if kind.section is not None:
            yield from sections(kind.section, (f"{key}.{name}" if key else name) + kind.entry_key)


def plain_settings() -> Iterator[tuple[str, Setting]]:
    """Yield key and setting of each plain value, also in lists, stages and mappings."""
    for section, cls in sections():
        for setting in settings(cls):
            if setting.section is None:
                yield f"{section}.{setting.name}".lstrip("."), setting


def setting_at(key: str) -> Setting:
    """Return the setting at a dotted key. Raises KeyError."""
    section, _, name = key.rpartition(".")
    return _setting(dict(sections())[section], name)


@functools.cache
def homes_of(name: str) -> tuple[str, ...]:
    """Return the keys that end in this name, outside of lists, stages and veRL's configuration."""
    plain = ((key, section) for key, section in sections() if "[" not in key and ".NAME" not in key)
    keys = [f"{key}.{name}".lstrip(".") for key, section in plain if name in section.model_fields]
    return tuple(key for key in keys if not key.startswith("trainer.trainer_config."))


def _setting(cls: type[BaseModel], name: str) -> Setting:
    kind, field = types_of(cls)[name], cls.model_fields[name]
    doc = field.description or ""
    default = None if field.default is PydanticUndefined else field.default
    core = get_origin(kind.plain) or kind.plain
    return Setting(
        **vars(kind),
        name=name,
        doc=" ".join(doc.split()),
        kind=_KINDS.get(core, "object"),
        default=list(default) if isinstance(default, tuple) else default,
        names=_names(cls, name),
    )


def _names(cls: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the built-in names for a setting that names a part."""
    if cls is AlgorithmConfig and name in ("algorithm_type", *PARTS):
        return tuple(registry_of(f"algorithm.{name}"))
    if cls is ReplayBufferConfig and name == "priority_fn":
        return tuple(registry_of("replay_buffer.priority_fn"))
    return tuple(registry_of(f"monitor.{name}")) if cls is MonitorConfig and name == "monitor_type" else ()
