"""What can be said about each setting, read from the models: for messages, the reference page and generated tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trinity_core.config.algorithm_types import ALGORITHMS, PARTS
from trinity_core.config.annotations import Bounds, Type, types_of
from trinity_core.config.schema import AlgorithmConfig, Config, MonitorConfig, ReplayBufferConfig
from trinity_core.config.types import IS_DERIVED, SameAs, Unit
from trinity_core.registry import registry_of

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
class Setting:
    """One key of a section."""

    name: str
    doc: str
    typed: Type
    kind: Kind
    """JSON type of a value."""
    default: Any
    """Default of a plain value; None where it is derived, or where the setting may be left empty."""
    names: tuple[str, ...] = ()
    """The names that are always known; a module in `plugin_dir` may bring more."""
    same_as: str = ""
    """The native key of which this is another spelling."""

    @property
    def optional(self) -> bool:
        """True if null is a value of its own."""
        return self.typed.optional

    @property
    def derived(self) -> bool:
        """True if the value follows from other settings when it is left out."""
        return IS_DERIVED in self.typed.extras

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that a choice, or an entry of a list of choices, may have."""
        return self.typed.choices

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of a number."""
        return self.typed.bounds

    @property
    def unit(self) -> str:
        """What a number counts."""
        return next((extra.name for extra in self.typed.extras if isinstance(extra, Unit)), "")

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a section (`object`), or of the entries of a list of sections (`array`)."""
        return self.typed.section


def settings(cls: type[BaseModel]) -> list[Setting]:
    """The settings of a section, in order."""
    return [_setting(cls, name) for name in cls.model_fields]


def sections(cls: type[BaseModel] = Config, key: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with its key, from the outermost inwards."""
    yield key, cls
    for name, found in types_of(cls).items():
        if found.section is not None:
            entry = "" if found.entry is None else ".NAME" if get_origin(found.plain) is dict else "[i]"
            yield from sections(found.section, (f"{key}.{name}" if key else name) + entry)


def setting_at(key: str) -> Setting:
    """The setting at a dotted key. Raises KeyError if there is none."""
    section, _, name = key.rpartition(".")
    return _setting(dict(sections())[section], name)


@functools.cache
def homes_of(name: str) -> tuple[str, ...]:
    """The keys of that name outside of lists, of stages and of veRL's configuration."""
    plain = ((key, section) for key, section in sections() if "[" not in key and ".NAME" not in key)
    found = [f"{key}.{name}".lstrip(".") for key, section in plain if name in section.model_fields]
    return tuple(key for key in found if not key.startswith("trainer.trainer_config."))


@functools.cache
def native_key(spelled: SameAs) -> str:
    """The dotted key of the setting that a spelling stands for."""
    home = next(key for key, section in sections() if issubclass(section, spelled.section))
    return f"{home}.{spelled.name}"


def _setting(cls: type[BaseModel], name: str) -> Setting:
    found, field = types_of(cls)[name], cls.model_fields[name]
    spelled = next((extra for extra in found.extras if isinstance(extra, SameAs)), None)
    doc = field.description or (spelled.section.model_fields[spelled.name].description if spelled else None) or ""
    default = None if field.default is PydanticUndefined else field.default
    core = get_origin(found.plain) or found.plain
    return Setting(
        name=name,
        doc=" ".join(doc.split()),
        typed=found,
        kind=_KINDS.get(core, "object"),
        default=list(default) if isinstance(default, tuple) else default,
        names=_names(cls, name),
        same_as=native_key(spelled) if spelled else "",
    )


def _names(cls: type[BaseModel], name: str) -> tuple[str, ...]:
    """The built-in names of a setting that names something."""
    if cls is AlgorithmConfig and name == "algorithm_type":
        return tuple(ALGORITHMS)
    if cls is AlgorithmConfig and name in PARTS:
        return tuple(registry_of(f"algorithm.{name}"))
    if cls is ReplayBufferConfig and name == "priority_fn":
        return tuple(registry_of("replay_buffer.priority_fn"))
    return tuple(registry_of(f"monitor.{name}")) if cls is MonitorConfig and name == "monitor_type" else ()
