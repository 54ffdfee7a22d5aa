"""Validates a tree of plain values with pydantic; errors become problems with file, line, key, value, message and
suggestion.

Nothing is raised: an unsuitable value is reported and its setting keeps the default, so that all problems of a
configuration are found at once.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from typing import Annotated, Any, TypeVar, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from trinity_core.base.errors import closest
from trinity_core.base.signatures import from_yaml
from trinity_core.config.fields import Type, homes_of, type_at, type_of, types_of
from trinity_core.config.findings import Code, Finding, Report, value_at
from trinity_core.config.foreign.names import TRL_SETTINGS
from trinity_core.config.foreign.table import accepted_keys
from trinity_core.config.source import key_of
from trinity_core.config.types import Flag, Integer, Number

T = TypeVar("T", bound=BaseModel)
Path = tuple[str | int, ...]

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
"""Expected kind of value, by the first word of pydantic's error type."""
EXACT = {bool: Flag, float: Number, int: Integer}
"""Plain types → the types used for settings: bools are not numbers, and text that reads as a number is one."""


def typed_section(cls: type[T], tree: Any, report: Report) -> T:
    """Return an instance of `cls` from a mapping; an unsuitable key is reported and keeps its default."""
    fitting = tree
    while True:
        try:
            return cls.model_validate(fitting)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        fitting = copy.deepcopy(fitting)
        for fault in faults:
            path = fault["loc"]
            key = key_of(path)
            if not path:
                report.add(Finding("", tree, "wrong-type", f"must be a section with keys, not {show(tree)}."))
                return cls()
            if not report.touched([key]):
                report.add(finding_of(key, value_at(tree, path), fault, type_at(cls, path[:-1])))
            _take_out(fitting, path, fault["type"])


@functools.cache
def exact(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model of the same arguments that takes values as settings do: a bool is no number, and text that reads
    as a number is one."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if from_yaml(annotation := field.rebuild_annotation()):
            typed = type_of(annotation)
            section = None if typed.entry else typed.section
            plain: Any = exact(section) if section else EXACT.get(typed.plain, typed.plain)
            plain = Annotated[(plain, *typed.extras)] if typed.extras else plain
            default = ... if field.is_required() else field.get_default(call_default_factory=True)
            fields[name] = (plain | None if typed.optional else plain, default)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Field name", UserWarning)  # an argument may be called `copy` or `json`
        made = create_model(model.__name__, __base__=(_Exact, model), **fields)
    if made.model_config.get("extra") != "allow":
        made.model_config["extra"] = "forbid"
        made.model_rebuild(force=True)
    return made


class _Exact(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, protected_namespaces=())


def finding_of(key: str, value: Any, fault: ErrorDetails, section: Type | None = None) -> Finding:
    """Convert one of pydantic's errors for the value at a key within a section."""
    kind, details = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(key, value, str(fault["loc"][-1]), section)
    if kind == "literal_error":
        choices = [text.strip("'") for text in re.split(", | or ", details["expected"])]
        message = f"must be one of {', '.join(choices)}, not {show(value)}."
        return Finding(key, value, "unknown-choice", message, suggestion=closest(str(value), choices))
    if kind.startswith(("greater_than", "less_than")):
        return Finding(
            key, value, "out-of-range", f"must be {fault['msg'].partition('should be ')[2]}, not {show(value)}."
        )
    if what := WANTED.get(kind.partition("_")[0]):
        return Finding(key, value, "wrong-type", f"must be {what}, not {show(value)}.")
    code: Code = "out-of-range" if kind == "largest" else "invalid" if kind == "value_error" else "wrong-type"
    return Finding(key, value, code, fault["msg"])


def _unknown(key: str, value: Any, name: str, section: Type | None) -> Finding:
    """Return a finding for an unknown key, suggesting a known key of its section."""
    cls = section.section if section is not None else None
    settings = types_of(cls) if cls else {}
    others = [spelling for spelling, _, native in accepted_keys(cls) if native] if cls else []
    sections = {
        other for other, typed in settings.items() if typed.section is not None or get_origin(typed.plain) is dict
    }
    meant = closest(name, sections if isinstance(value, dict) else [*settings, *others])
    if name in TRL_SETTINGS and not meant:
        return Finding(key, value, "unknown-key", f"is not a known key: TRL's {name} is here {TRL_SETTINGS[name]}.")
    homes = [] if meant else homes_of(name)
    message = f"is not a known key; `{homes[0]}` is." if len(homes) == 1 else "is not a known key."
    return Finding(key, value, "unknown-key", message, suggestion=meant)


def _take_out(tree: Any, path: Path, kind: str) -> None:
    """Remove the value at a path. A section in a list becomes an empty one; a list with a bad entry is removed as a
    whole."""
    if isinstance(path[-1], int) and kind == "model_type":
        parent = value_at(tree, path[:-1])
        if isinstance(parent, list):
            parent[path[-1]] = {}
            return
    last = max(index for index, part in enumerate(path) if isinstance(part, str))
    parent = value_at(tree, path[:last])
    if isinstance(parent, dict):
        parent.pop(path[last], None)


def show(value: Any) -> str:
    """Format a value briefly, as the user would write it."""
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
