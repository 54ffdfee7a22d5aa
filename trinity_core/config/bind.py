"""A tree of plain values becomes dataclasses. Everything that does not fit is reported; nothing is raised."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from trinity_core.config.problems import Report, closest
from trinity_core.config.source import parse_value
from trinity_core.config.types import IS_DERIVED, IS_HIDDEN, Range

T = TypeVar("T")

BAD: Any = object()
"""Stands for a value that did not fit; the field keeps its default."""


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """The type of each setting of a section, annotations included."""
    found = get_type_hints(cls, include_extras=True)
    return {
        field.name: found[field.name]
        for field in dataclasses.fields(cls)
        if IS_HIDDEN not in unpack(found[field.name])[1]
    }


def unpack(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """`Annotated[int, Range(1)]` → (int, (Range(1),))."""
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        return inner, tuple(extras)
    return hint, ()


def as_written(hint: Any, value: Any, key: str, texts: Mapping[str, str]) -> Any:
    """The value with its own text (`texts`, by key) wherever text is wanted and YAML read something else.

    So `name: 1.10` is called 1.10, and an environment variable keeps its leading zeros.
    """
    kind, _ = unpack(hint)
    if get_origin(kind) in (types.UnionType, Union):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    if isinstance(value, list) and get_origin(kind) is list:
        (entry,) = get_args(kind)
        return [as_written(entry, item, f"{key}[{index}]", texts) for index, item in enumerate(value)]
    if isinstance(value, dict) and (dataclasses.is_dataclass(kind) or get_origin(kind) is dict):
        known = hints(cast(Hashable, kind)) if dataclasses.is_dataclass(kind) else None
        entries = {name: get_args(kind)[1] if known is None else known.get(name, Any) for name in value}
        prefix = f"{key}." if key else ""
        return {name: as_written(entries[name], item, f"{prefix}{name}", texts) for name, item in value.items()}
    return texts.get(key, value) if kind is str and isinstance(value, int | float) else value


def bind(cls: type[T], tree: Any, key: str, report: Report) -> T:
    """An instance of `cls` from a mapping; a key that does not fit is reported and keeps its default."""
    if tree is None:
        return cls()
    if not isinstance(tree, dict):
        report.add(key, tree, f"must be a section with keys, not {_show(tree)}.")
        return cls()
    known = hints(cast(Hashable, cls))
    values = {}
    for name, value in tree.items():
        path = f"{key}.{name}" if key else str(name)
        if report.touched([path]):
            continue
        if name not in known:
            report.add(path, value, "is not a known key.", _meant(str(name), value, known))
        elif (bound := convert(known[name], value, path, report)) is not BAD:
            values[name] = bound
    return cls(**values)


def _meant(name: str, value: Any, known: dict[str, Any]) -> str:
    """The known key most like this one; where a section was given, the section."""
    sections = [other for other, hint in known.items() if dataclasses.is_dataclass(unpack(hint)[0])]
    return closest(name, sections if isinstance(value, dict) else ()) or closest(name, known)


def convert(hint: Any, value: Any, key: str, report: Report) -> Any:
    """The value as this type, or BAD after a report."""
    inner, extras = unpack(hint)
    if value is None and IS_DERIVED in extras:
        return None
    result = _convert_plain(inner, value, key, report)
    if result is None or result is BAD:
        return result
    for extra in extras:
        if isinstance(extra, Range) and not extra.holds(result):
            report.add(key, value, f"must be {extra}, not {_show(value)}.")
            return BAD
    return result


def _convert_plain(hint: Any, value: Any, key: str, report: Report) -> Any:
    """`convert` without annotations."""
    if get_origin(hint) is Annotated:
        return convert(hint, value, key, report)
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return None if value is None else convert(inner, value, key, report)
    if dataclasses.is_dataclass(hint):
        return bind(cast(type, hint), value, key, report)
    if origin is Literal:
        return _choice(get_args(hint), value, key, report)
    if origin in (list, tuple, dict):
        return _container(origin, get_args(hint), value, key, report)
    return _scalar(hint, value, key, report)


def _choice(choices: tuple[str, ...], value: Any, key: str, report: Report) -> Any:
    if value in choices:
        return value
    listed = ", ".join(choices)
    report.add(key, value, f"must be one of {listed}, not {_show(value)}.", closest(str(value), choices))
    return BAD


def _container(origin: type, args: tuple[Any, ...], value: Any, key: str, report: Report) -> Any:
    if value is None and origin is not tuple:
        return origin()
    if origin is dict:
        if not isinstance(value, dict):
            report.add(key, value, f"must be a section with keys, not {_show(value)}.")
            return BAD
        bound = {str(name): convert(args[1], item, f"{key}.{name}", report) for name, item in value.items()}
        return {name: item for name, item in bound.items() if item is not BAD}
    if not isinstance(value, list | tuple):
        report.add(key, value, f"must be a list, not {_show(value)}.")
        return BAD
    if origin is tuple and len(value) != len(args):
        report.add(key, value, f"must have {len(args)} entries, not {len(value)}.")
        return BAD
    kinds = args if origin is tuple else args * len(value)
    items = [
        convert(kind, item, f"{key}[{i}]", report) for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    return BAD if any(item is BAD for item in items) else origin(items)


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _scalar(kind: type, value: Any, key: str, report: Report) -> Any:
    """A number, switch or text. Text that reads as a number is taken as one, because environment variables are text."""
    given = value
    if isinstance(value, str) and kind is not str:
        try:
            value = parse_value(value)
            value = float(value) if isinstance(value, str) else value
        except (yaml.YAMLError, ValueError):
            value = given
    fits: Any = BAD
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        fits = value if isinstance(value, bool) else BAD
    elif kind is int:
        fits = int(value) if number and math.isfinite(value) and value == int(value) else BAD
    elif kind is float:
        fits = float(value) if number and math.isfinite(value) else BAD
    elif isinstance(value, str) or number:
        fits = str(value)
    if fits is BAD:
        report.add(key, given, f"must be {_WORDS[kind]}, not {_show(given)}.")
    return fits


def _show(value: Any) -> str:
    """A value as the user would write it, short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "...'"
