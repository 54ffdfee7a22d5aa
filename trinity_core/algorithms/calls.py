"""Calls parts with the inputs that they take and the arguments of the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trinity_core.errors import InputError


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def refuse_unknown(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise InputError for an argument that the function does not take."""
    parameters = inspect.signature(function).parameters
    if unknown := set(args) - set(parameters):
        known = ", ".join(sorted(name for name, p in parameters.items() if p.default is not p.empty)) or "none"
        raise InputError(f"{function.__name__} does not know {', '.join(sorted(unknown))}; it takes: {known}")


def call_with(function: Callable[..., Any], inputs: Mapping[str, Any], args: Mapping[str, Any]) -> Any:
    """Call with the given `inputs` that the function takes, and with all `args`.

    Raises InputError for an unknown argument and for a missing required input.
    """
    refuse_unknown(function, args)
    parameters = inspect.signature(function).parameters
    given = {name: value for name, value in inputs.items() if name in parameters and value is not None} | dict(args)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    if missing := required - set(given):
        raise InputError(f"{function.__name__} needs {', '.join(sorted(missing))}")
    return function(**given)
