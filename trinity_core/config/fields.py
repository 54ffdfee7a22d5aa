"""What can be said about each setting, read from the schema: for the reference page, forms and parameter schemas."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin

from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.bind import hints, unpack
from trinity_core.config.parts import PARTS
from trinity_core.config.schema import AlgorithmConfig
from trinity_core.config.types import IS_DERIVED, IS_NO_EFFECT, Range, SameAs, Unit

Kind = Literal["integer", "number", "boolean", "string", "array", "object"]
_KINDS: dict[Any, Kind] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    list: "array",
    tuple: "array",
}


@dataclass(frozen=True)
class Setting:
    """One key of a section."""

    name: str
    doc: str
    kind: Kind
    """JSON type of a value."""
    default: Any
    """Default of a plain value; None where it is derived, or where the setting may be left empty."""
    optional: bool
    """Null is a value of its own."""
    derived: bool
    """Left out, the value follows from other settings."""
    choices: tuple[str, ...] = ()
    """All values there are."""
    names: tuple[str, ...] = ()
    """The values that are always there; a module in `plugin_dir` may bring more."""
    bounds: Range | None = None
    unit: str = ""
    same_as: str = ""
    """The native key of which this is another spelling."""
    no_effect: bool = False
    section: type | None = None
    """The dataclass behind a section (`object`), or behind the entries of a list of sections (`array`)."""


def settings(cls: type) -> list[Setting]:
    """The settings of a section, in order."""
    texts = docs(cls)
    defaults = {field.name: _default(field) for field in dataclasses.fields(cast(Any, cls))}
    found = hints(cast(Hashable, cls))
    named: dict[str, Iterable[str]] = {"algorithm_type": ALGORITHMS, **PARTS} if cls is AlgorithmConfig else {}
    listed = [_setting(name, hint, texts.get(name, ""), defaults[name]) for name, hint in found.items()]
    return [dataclasses.replace(setting, names=tuple(named.get(setting.name, ()))) for setting in listed]


@functools.cache
def docs(cls: Any) -> dict[str, str]:
    """The doc literal under each field of a section, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cast(type, base)))).body
        body = cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def json_schema(cls: type) -> dict[str, Any]:
    """JSON Schema of a section and all below it, for forms and for checks elsewhere."""
    properties = {setting.name: _schema(setting) for setting in settings(cls)}
    described = {"description": inspect.getdoc(cls) or ""}
    return {
        "type": "object",
        "title": cls.__name__,
        **described,
        "properties": properties,
        "additionalProperties": False,
    }


def _schema(setting: Setting) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if setting.section is not None:
        inner = json_schema(setting.section)
        schema = {"type": "array", "items": inner} if setting.kind == "array" else inner
    elif not setting.no_effect:
        schema["type"] = [setting.kind, "null"] if setting.optional or setting.derived else setting.kind
    if setting.names:
        schema["examples"] = list(setting.names)
    if setting.choices:
        schema["enum"] = [*setting.choices, *([None] if setting.optional or setting.derived else [])]
    if setting.bounds:
        low = "exclusiveMinimum" if setting.bounds.exclusive else "minimum"
        schema |= {low: setting.bounds.low} if setting.bounds.low is not None else {}
        schema |= {"maximum": setting.bounds.high} if setting.bounds.high is not None else {}
    if setting.unit:
        schema["unit"] = setting.unit
    if setting.section is None or setting.kind == "array":
        schema["default"] = setting.default
    return schema | {"description": setting.doc}


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default as a plain value; None for a section."""
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(made):
        return None
    return list(made) if isinstance(made, tuple) else made


def _setting(name: str, hint: Any, doc: str, default: Any) -> Setting:
    layers = list(_layers(hint))
    inner = layers[-1][0]
    extras = [extra for _, found in layers for extra in found]
    origin = get_origin(inner)
    args = get_args(inner)
    entry = inner if origin is None else args[-1] if origin in (list, dict) else None
    section = entry if isinstance(entry, type) and dataclasses.is_dataclass(entry) else None
    return Setting(
        name=name,
        doc=doc,
        kind=_KINDS.get(str if origin is Literal else origin or inner, "object"),
        default=default,
        optional=any(get_origin(layer) in (types.UnionType, Union) for layer, _ in layers),
        derived=IS_DERIVED in extras,
        choices=args if origin is Literal else (),
        bounds=next((extra for extra in extras if isinstance(extra, Range)), None),
        unit=next((extra.name for extra in extras if isinstance(extra, Unit)), ""),
        same_as=next((extra.key for extra in extras if isinstance(extra, SameAs)), ""),
        no_effect=IS_NO_EFFECT in extras,
        section=section,
    )


def _layers(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """A type without its annotations, then without its null, down to the plain type; each with what was taken off."""
    inner, extras = unpack(hint)
    yield inner, extras
    if get_origin(inner) in (types.UnionType, Union):
        (option,) = (option for option in get_args(inner) if option is not type(None))
        yield from _layers(option)
