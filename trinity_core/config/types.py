"""The types of settings: possible values, unit, and the source of omitted values.

A setting's type contains everything that can be said about the setting alone; validation, the reference page and the
JSON Schema derive from it. Text that reads as a number is accepted as one, because environment variables are text; but
numbers and bools are never accepted for each other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Never, Self, TypeVar

import yaml
from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trinity_core.config.yaml_text import parse_value

T = TypeVar("T")
LARGEST = 2**63
"""Integers end up in arrays and databases, which have 64 bits."""


class FrozenDict(dict[str, T]):
    """A dict that cannot be changed; `{**frozen}` makes a mutable copy."""

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise TypeError("a configuration is immutable: make another one with with_values()")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    pop = popitem = clear = update = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenDict[T]:
        return FrozenDict(copy.deepcopy(dict(self), memo))


@dataclass(frozen=True)
class Unit:
    """Unit of a number: tokens, steps, seconds."""

    name: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "unit": self.name}


@dataclass(frozen=True)
class OneOrMany:
    """Allows a single name instead of a list of names."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "string"}]}


@dataclass(frozen=True)
class _Derived:
    """Marks a setting that may be null or omitted, and is then filled by `resolve`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


def _number(value: Any) -> Any:
    """Convert a text that reads as a number; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        read = parse_value(value)
        return float(read) if isinstance(read, str) else read
    except (yaml.YAMLError, ValueError):
        return value


def _whole(value: Any) -> Any:
    number = _number(value)
    whole = int(number) if isinstance(number, float) and number.is_integer() else number
    if isinstance(whole, int) and abs(whole) >= LARGEST:
        raise PydanticCustomError("largest", "must be smaller than 2**63.")
    return whole


def _flag(value: Any) -> Any:
    return read if isinstance(read := _number(value), bool) else value


def _entries(value: Any) -> Any:
    return () if value is None else value


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _entries(value)


def _keys(value: Any) -> Any:
    return {} if value is None else value


def _pair(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) != 2:
        raise PydanticCustomError("entries", "must have 2 entries, not {count}.", {"count": len(value)})
    return value


SEVERAL = "|"
"""Separates the paths of a list in one text."""


@dataclass(frozen=True)
class Listed:
    """Allows a text, or a list of texts that `SEVERAL` joins."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._joined, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": "array", "items": {"type": "string"}, "minItems": 1}]}

    @staticmethod
    def _joined(value: Any) -> Any:
        is_list = isinstance(value, list | tuple) and bool(value) and all(isinstance(part, str) for part in value)
        paths = value if is_list else value.split(SEVERAL) if isinstance(value, str) else ()
        if len(paths) > 1 and not all(path.strip() for path in paths):
            raise PydanticCustomError("empty_entry", "must have no empty entry.")
        if any(SEVERAL in path for path in paths):
            raise PydanticCustomError("separator", f"must be paths without {SEVERAL}, which stands between two paths.")
        return SEVERAL.join(value) if is_list else value


IS_DERIVED = _Derived()

Derived = Annotated[T, IS_DERIVED]
"""A setting whose default follows from others. In a resolved configuration its value is of type T."""
DERIVED: Any = None

Flag = Annotated[bool, BeforeValidator(_flag), Strict()]
Integer = Annotated[int, BeforeValidator(_whole), Strict()]
Number = Annotated[float, BeforeValidator(_number), Strict()]
Many = Annotated[tuple[T, ...], BeforeValidator(_entries)]
"""A list; null means an empty one."""
Names = Annotated[tuple[str, ...], BeforeValidator(_names), OneOrMany()]
"""A list of names; a single one needs no brackets."""
Named = Annotated[dict[str, T], BeforeValidator(_keys), AfterValidator(FrozenDict)]
"""Entries by name; null means none."""
EMPTY: FrozenDict[Any] = FrozenDict()
"""The default of a `Named` setting."""
Args = Named[Any]

Paths = Annotated[str, Listed()]
"""A path, or a list of paths that form one data set."""
Count = Annotated[Integer, Ge(1)]
Natural = Annotated[Integer, Ge(0)]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
Share = Annotated[Number, Ge(0), Le(1)]
PositiveShare = Annotated[Number, Gt(0), Le(1)]
Betas = Annotated[tuple[Share, Share], BeforeValidator(_pair)]
Tokens = Annotated[Count, Unit("tokens")]
Port = Annotated[Integer, Ge(0), Le(65535)]
Steps = Annotated[Count, Unit("steps")]
StepsOrNone = Annotated[Natural, Unit("steps")]
Seconds = Annotated[Positive, Unit("seconds")]
Seed = Annotated[Integer, Ge(0), Le(2**32 - 1)]
"""The range that every random generator accepts: numpy's, torch's, vLLM's."""


class Section(BaseModel):
    """A section of the YAML: immutable, without unknown keys. The doc of a setting follows its field."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_has_defaults(cls, value: Any) -> Any:
        return {} if value is None else value

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values at dotted keys, such as `{"synchronizer.sync_method": "memory"}`.

        Raises pydantic's ValidationError for an unknown key or an unsuitable value.
        """
        changed: dict[str, Any] = {}
        below: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            name, _, rest = key.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = value
            else:
                changed[name] = value
        changed |= {name: getattr(self, name).with_values(inner) for name, inner in below.items()}
        checked = self.model_validate({**self.__dict__, **changed})
        return self.model_copy(update={name: getattr(checked, name) for name in changed})
