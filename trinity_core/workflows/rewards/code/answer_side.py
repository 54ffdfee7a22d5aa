"""Runs in a sandbox: loads `solution.py`, the answer's program, and answers calls of its functions.

`prompt.py`, loaded before it, has what the row's prompt defines.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from trinity_core.workflows.rewards.code.sandbox_rpc import (
    NAMES,
    SPECIALS,
    Line,
    completed,
    decoded,
    encoded,
    tried,
)


def main(line: Line) -> None:
    """Load the answer and serve requests of the other side."""
    namespace = _loaded("prompt.py", "solution.py")
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def kept(value: Any) -> int | list[str]:
        if isinstance(value, type) and issubclass(value, Exception):
            return _names(value)
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def resolved(sent: Any) -> Any:
        """Return an object by its number, or a new one of a class by the class's name and its fields."""
        if not isinstance(sent, list):
            return objects[sent]
        name, fields = sent
        made = object.__new__(namespace[name])
        for field, value in decoded(fields, resolved).items():
            object.__setattr__(made, field, value)
        return made

    def replied(what: str, sent: list[Any]) -> dict[str, Any]:
        arguments = decoded(sent, resolved)
        value = _done(namespace, what, arguments)
        reply: dict[str, Any] = {"awaited": True} if inspect.iscoroutine(value) else {}
        reply["value"] = encoded(completed(value), kept)
        if what == "call" and (changed := encoded(arguments[1:], kept)) != sent[1:]:
            reply["changed"] = changed
        if what == "call" and type(value) in (list, dict, set):
            reply["given"] = next((index for index, argument in enumerate(arguments[1]) if argument is value), None)
        return reply

    while True:
        try:
            what, arguments = line.receive()
        except EOFError:
            return
        with redirect_stdout(io.StringIO()) as printed:
            reply, error = tried(lambda: replied(what, arguments))  # noqa: B023 - called at once
        if error is not None:
            crossing, _ = tried(lambda: encoded([*error.args], kept))  # noqa: B023 - called at once
            reply = {"raised": {"kinds": _names(type(error)), "arguments": crossing or [], "text": str(error)}}
        line.send(json.dumps(reply | {"printed": printed.getvalue()}))


def _names(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__]


def _done(namespace: dict[str, Any], what: str, operands: list[Any]) -> Any:
    match what, operands:
        case "name", [name]:
            if name not in namespace:
                raise NameError(f"name '{name}' is not defined")
            return namespace[name]
        case "method", [name]:  # a function, or a method of the class Solution
            if name not in namespace and "Solution" in namespace:
                return getattr(namespace["Solution"](), name)
            return namespace[name]
        case "call", [function, arguments, named]:
            return function(*arguments, **named)
        case "attribute", [owner, name]:
            return getattr(owner, name)
        case "set", [owner, name, value]:
            setattr(owner, name, value)
        case "special", [owner, name, arguments]:
            return SPECIALS[name](owner, *arguments)
        case "next", [owner, count]:
            return _next(owner, count)
        case "data", [owner]:
            kinds = (int, float, str, list, dict, *NAMES)
            return next((kind(owner) for kind in kinds if isinstance(owner, kind)), owner)
    return None


ENDS: dict[int, BaseException] = {}
"""Iterator, by its id -> the exception that ended it, if items before it have been sent."""


def _next(iterator: Any, count: int) -> list[Any]:
    """Return up to `count` of the next items. Raises what the iterator raises in place of the first of them."""
    items: list[Any] = []
    while len(items) < count:
        item, error = (None, ENDS.pop(id(iterator))) if id(iterator) in ENDS else tried(lambda: next(iterator))
        if error is not None:
            if not items:
                raise error
            ENDS[id(iterator)] = error
            break
        items.append(item)
    return items


def _loaded(*paths: str) -> dict[str, Any]:
    module = types.ModuleType("solution")
    module.__file__ = paths[-1]
    sys.modules["solution"] = module
    for path in paths:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)  # noqa: S102 - in a sandbox
    return module.__dict__
