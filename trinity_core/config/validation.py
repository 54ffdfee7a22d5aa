"""pydantic's verdict on a tree of plain values, as problems with file, line, key, value, message and suggestion.

Nothing here is raised: a value that does not fit is reported and its setting keeps the default, so that all problems of
a configuration are found at once.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trinity_core.config.annotations import Bounds, Type, type_at, type_of, types_of
from trinity_core.config.fields import homes_of
from trinity_core.config.problems import Report
from trinity_core.config.types import Flag, Integer, Number
from trinity_core.slips import closest

T = TypeVar("T", bound=BaseModel)
Path = tuple[str | int, ...]

BAD: Any = object()
"""Stands for a value that did not fit."""
WANTED = {
    "bool": "true or false",
    "dict": "a section with keys",
    "finite": "a number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "a section with keys",
    "string": "text",
    "tuple": "a list",
}
"""What a value must be, by the first word of pydantic's type of error."""
EXACT = {bool: Flag, float: Number, int: Integer}
"""Plain types → those that settings have: a flag is no number, and text that reads as a number is one."""


def bound(cls: type[T], tree: Any, report: Report) -> T:
    """An instance of `cls` from a mapping; a key that does not fit is reported and keeps its default."""
    fitting = copy.deepcopy(tree)
    while True:
        try:
            return cls.model_validate(fitting)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        for fault in faults:
            path = fault["loc"]
            key = key_of(path)
            if not path:
                report.add("", tree, f"must be a section with keys, not {show(tree)}.")
                return cls()
            if not report.touched([key]):
                value = _at(tree, path)
                report.add(key, value, *_said(fault, value, type_at(cls, path), type_at(cls, path[:-1])))
            _take_out(fitting, path, fault["type"])


def convert(hint: Any, value: Any, key: str, report: Report) -> Any:
    """The value as this type, or BAD after a report."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            path = fault["loc"]
            at = f"{key}{key_of(path, below=True)}"
            report.add(at, _at(value, path), *_said(fault, _at(value, path), type_of(hint), None))
        return BAD


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    found = type_of(hint)
    exact: Any = EXACT.get(found.plain) if isinstance(found.plain, type) else None
    if exact is not None:
        hint = Annotated[(exact, *found.extras)] if found.extras else exact
        hint = hint | None if found.optional else hint
    return TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False))


def as_written(cls: type[BaseModel], tree: Any, texts: Mapping[str, str], path: Path = ()) -> Any:
    """The tree at a path with its own text (`texts`, by key) wherever text is wanted and YAML read something else.

    So `name: 1.10` is called 1.10, and an environment variable keeps its leading zeros.
    """
    return _as_written(Type(cls, (), False), tree, path, texts)


def _as_written(wanted: Type | None, value: Any, path: Path, texts: Mapping[str, str]) -> Any:
    if wanted is None:
        return value
    if isinstance(value, list):
        return [_as_written(wanted.entry, item, (*path, index), texts) for index, item in enumerate(value)]
    if isinstance(value, dict):
        model = isinstance(wanted.plain, type) and issubclass(wanted.plain, BaseModel)
        known = types_of(wanted.plain) if model else dict.fromkeys(value, wanted.entry)
        return {name: _as_written(known.get(name), item, (*path, str(name)), texts) for name, item in value.items()}
    return texts.get(key_of(path), value) if wanted.plain is str and isinstance(value, int | float) else value


def key_of(path: Sequence[str | int], below: bool = False) -> str:
    """`("a", 0, "b")` → `a[0].b`, and `.a[0].b` if it is to stand below another key."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return key if below else key.removeprefix(".")


def _said(fault: ErrorDetails, value: Any, wanted: Type | None, section: Type | None) -> tuple[str, str]:
    """The message and the suggestion for one of pydantic's errors."""
    kind, details = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(str(fault["loc"][-1]), value, section)
    if kind == "literal_error":
        choices = [text.strip("'") for text in re.split(", | or ", details["expected"])]
        return f"must be one of {', '.join(choices)}, not {show(value)}.", closest(str(value), choices)
    if kind.startswith(("greater_than", "less_than")):
        bounds = (wanted and wanted.bounds) or Bounds(details.get("ge", details.get("gt")), details.get("le"))
        return f"must be {bounds}, not {show(value)}.", ""
    what = WANTED.get(kind.partition("_")[0])
    return (f"must be {what}, not {show(value)}." if what else fault["msg"]), ""


def _unknown(name: str, value: Any, section: Type | None) -> tuple[str, str]:
    """The message about an unknown key, and the known key of its section that was probably meant."""
    known = types_of(section.section) if section is not None and section.section is not None else {}
    sections = {other for other, typed in known.items() if typed.section is not None or get_origin(typed.plain) is dict}
    meant = closest(name, sections if isinstance(value, dict) else known)
    homes = [] if meant else homes_of(name)
    if len(homes) == 1:
        return f"is not a known key; `{homes[0]}` is.", ""
    return "is not a known key.", meant


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    """The value at a path, or None."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _take_out(tree: Any, path: Path, kind: str) -> None:
    """Remove the value at a path: a section in a list becomes an empty one, and a list with a bad entry goes whole."""
    if isinstance(path[-1], int) and kind == "model_type":
        parent = _at(tree, path[:-1])
        if isinstance(parent, list):
            parent[path[-1]] = {}
            return
    last = max(index for index, part in enumerate(path) if isinstance(part, str))
    parent = _at(tree, path[:last])
    if isinstance(parent, dict):
        parent.pop(path[last], None)


def show(value: Any) -> str:
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
