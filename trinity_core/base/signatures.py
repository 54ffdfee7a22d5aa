"""A function's arguments as a pydantic model, derived from its signature: names, types, defaults, bounds, docs.

User functions may have any annotation: types that YAML cannot express become `Any`, as do string annotations whose
names exist only for type checkers. `call_with` calls a function with those of its inputs that it takes.
"""

from __future__ import annotations

import inspect
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model

from trinity_core.base.errors import InputError

PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class ArgumentsOf:
    """`Annotated[Mapping[str, Any], ArgumentsOf(function)]`: a section with the arguments of another function."""

    function: Callable[..., Any]
    inputs: tuple[str, ...] = ()
    """Parameters that are not arguments."""


@dataclass(frozen=True)
class Choices:
    """`Annotated[Kind, Choices(names)]`: a configuration gives one of these names."""

    names: Callable[[], Iterable[str]]


@dataclass(frozen=True)
class ActsWith:
    """`Annotated[Kind, ActsWith(other, value)]`: an argument without effect unless the argument `other` has this value;
    without a value, unless it is on: not None, False or "none"."""

    other: str
    value: str | None = None

    def acts(self, value: Any) -> bool:
        if self.value is not None:
            return bool(value == self.value)
        return value is not None and value is not False and value != "none"


def any_arguments(**args: Any) -> None:
    """A stand-in for a part that takes any arguments."""


class Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)


def arguments_model(
    name: str, functions: Iterable[Callable[..., Any]], inputs: Collection[str] = (), leading: int = 0
) -> type[BaseModel] | None:
    """Return a model called `name` of the combined arguments of these functions, without their inputs.

    A pydantic model among the functions stands for itself. `**args` accepts any other argument; `**_`, or any name with
    a leading underscore, accepts none. None if a function has no signature, such as some built-ins.
    """
    functions = tuple(functions)
    if len(functions) == 1 and isinstance(functions[0], type) and issubclass(functions[0], BaseModel):
        return functions[0]
    fields: dict[str, Any] = {}
    bases: tuple[type[BaseModel], ...] = (Arguments,)
    for function in functions:
        if isinstance(function, type) and issubclass(function, BaseModel):
            bases = (function, *bases)
            continue
        try:
            parameters = list(inspect.signature(function).parameters.values())[leading:]
        except (TypeError, ValueError):
            return None
        if any(item.kind is item.VAR_KEYWORD and not item.name.startswith("_") for item in parameters):
            bases = (_Open, *(base for base in bases if base is not Arguments))
        for parameter in parameters:
            by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if by_name and parameter.name == "model_config":  # reserved by pydantic, so no field can have the name
                bases = (_Open, *(base for base in bases if base is not Arguments))
            elif by_name and parameter.name not in inputs and not parameter.name.startswith("_"):
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[parameter.name] = (_kind(function, parameter), default)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Field name", UserWarning)  # an argument may be called `copy` or `json`
        return create_model(name, __base__=bases, **fields)


class _Open(Arguments):
    model_config = ConfigDict(extra="allow")


def _kind(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter, `Any` if YAML cannot express it. A default of None is always allowed."""
    if parameter.annotation is parameter.empty:
        return Any
    kind = _evaluated(function, parameter.annotation)
    for extra in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        if isinstance(extra, ArgumentsOf):
            kind = arguments_model(parameter.name, (extra.function,), extra.inputs) or Any
        elif isinstance(extra, Choices):
            kind = Literal[tuple(extra.names())]
    if not from_yaml(kind):
        return Any
    return kind | None if parameter.default is None and not _optional(kind) else kind


def _evaluated(function: Callable[..., Any], annotation: Any) -> Any:
    """Resolve a string annotation; `Any` if it cannot be resolved here."""
    if not isinstance(annotation, str):
        return annotation
    module = sys.modules.get(inspect.unwrap(function).__module__)
    try:
        return eval(annotation, dict(vars(module)) if module else {})  # noqa: S307 - code of a module that was run
    except (NameError, SyntaxError, AttributeError, LookupError, TypeError, ValueError):
        return Any


def from_yaml(kind: Any) -> bool:
    """True for str, int, float, bool, Literal and sections of arguments, and for lists, dicts and Optional of them."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return from_yaml(args[0])
    if origin in (types.UnionType, Union):
        options = [option for option in args if option is not type(None)]
        return len(options) == 1 and from_yaml(options[0])
    if origin in (list, dict):
        return all(from_yaml(arg) for arg in args)
    return kind in PLAIN or origin is Literal or (isinstance(kind, type) and issubclass(kind, Arguments))


def _optional(kind: Any) -> bool:
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return type(None) in get_args(inner)


def keywords(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def refuse_unknown(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if unknown := set(args) - set(parameters):
        optional = ", ".join(sorted(name for name, p in parameters.items() if p.default is not p.empty)) or "none"
        raise InputError(
            f"{function.__name__} does not know {', '.join(sorted(unknown))}; it takes: {optional}", key=min(unknown)
        )


def call_with(function: Callable[..., Any], inputs: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """Call a function with those of `inputs` that it takes, and with all `args`.

    Raises InputError for an unknown argument or a missing required input.
    """
    refuse_unknown(function, args)
    parameters = inspect.signature(function).parameters
    values = {name: value for name, value in inputs.items() if name in parameters and value is not None} | dict(args)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if missing := required - set(values):
        raise InputError(f"{function.__name__} needs {', '.join(sorted(missing))}", key=min(missing))
    return function(**values)
