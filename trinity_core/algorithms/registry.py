"""How parts are found by name: plain dicts, a decorator to add to them, and errors that say what there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trinity_core.errors import TrinityError

Part = TypeVar("Part")


class InputError(TrinityError, ValueError):
    """What was given to an algorithm cannot be used: a missing or misshapen tensor, a NaN, an unknown argument."""


def register(registry: dict[str, Any], name: str) -> Callable[[Part], Part]:
    """A decorator that makes a part known by `name`: `@register(ADVANTAGES, "mine")`.

    Raises InputError where the name is taken: a module that silently replaced a part would change every run.
    """

    def add(part: Part) -> Part:
        if name in registry:
            raise InputError(f"'{name}' is registered already; choose another name for {part!r}")
        registry[name] = part
        return part

    return add


def find(registry: Mapping[str, Part], name: str, kind: str) -> Part:
    """The part of that name, or an InputError that lists the names there are."""
    if name not in registry:
        raise InputError(f"there is no {kind} '{name}'; there are: {', '.join(sorted(registry))}")
    return registry[name]


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def refuse_unknown(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise InputError for an argument that the function does not know."""
    parameters = inspect.signature(function).parameters
    if unknown := set(args) - set(parameters):
        known = ", ".join(sorted(name for name, p in parameters.items() if p.default is not p.empty)) or "none"
        raise InputError(f"{function.__name__} does not know {', '.join(sorted(unknown))}; it takes: {known}")


def call_with(function: Callable[..., Any], inputs: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """Call with those inputs the function takes and that are given, and with all `args`.

    Raises InputError for an argument it does not know and for an input that it needs and was not given.
    """
    refuse_unknown(function, args)
    parameters = inspect.signature(function).parameters
    given = {name: value for name, value in inputs.items() if name in parameters and value is not None} | dict(args)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if missing := required - set(given):
        raise InputError(f"{function.__name__} needs {', '.join(sorted(missing))}")
    return function(**given)
