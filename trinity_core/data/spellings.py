"""Whether two messages say the same, however clients spell them: what tells that a request continues an answer."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from trinity_core.data.turns import Message

CALLS_AS_TEXT = "Calling tools:"
"""What smolagents writes before the calls of an answer, a Python list of them."""


def canonical(message: Message) -> str:
    """A message as a text that is equal for all its spellings.

    Clients send an answer back with or without empty fields, its content as text or as parts, with other white space,
    and if it is JSON with another order of keys; a tool's arguments as an object or as JSON within JSON; calls as text
    (smolagents). Of an answer only its content and its tool calls count: reasoning need not come back. A message that
    JSON cannot hold in this form, such as one nested too deep, equals only itself.
    """
    try:
        return json.dumps(said(message), sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(message)


def said(message: Message) -> dict[str, Any]:
    """What counts of a message, by name: equal for all its spellings."""
    role, content = message.get("role"), _text(message.get("content"))
    if role != "assistant":
        plain = {"role": role, "content": content}
        return plain | {name: value for name, value in message.items() if name not in plain and value is not None}
    calls = message.get("tool_calls") or ()
    if not calls and isinstance(content, str) and CALLS_AS_TEXT in content:
        content, calls = _calls_in(content)
    return {
        "role": role,
        "content": _without_spaces(content) if isinstance(content, str) else content,
        "tool_calls": [_name_and_arguments(call) for call in calls],
    }


def _name_and_arguments(call: Any) -> Any:
    """What counts of a call; a malformed one is compared as it is."""
    function = (call.get("function") or {}) if isinstance(call, Mapping) else None
    return [function.get("name"), parsed(function.get("arguments"))] if isinstance(function, Mapping) else call


def _without_spaces(text: str) -> Any:
    """What JSON says; any other text with one space for each run of white space."""
    value = parsed(text) if text.lstrip()[:1] in ("{", "[") else text
    return " ".join(value.split()) if isinstance(value, str) else value


def _calls_in(content: str) -> tuple[str, list[Message]]:
    """The text before calls that are written as a Python list, and these; all of the text if they cannot be read."""
    text, _, listed = content.rpartition(CALLS_AS_TEXT)
    try:
        calls = ast.literal_eval(listed.strip())
        json.dumps(calls, sort_keys=True)  # an int of too many digits, keys that cannot be sorted, a set
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return content, []
    return (text, calls) if isinstance(calls, list) and all(map(_is_call, calls)) else (content, [])


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    return arguments is None or (isinstance(arguments, str | dict) and all(isinstance(key, str) for key in arguments))


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def parsed(arguments: Any) -> Any:
    """The arguments of a call as an object, or their text if it is no JSON."""
    while isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):  # no JSON; more than 4300 digits; too deep
            break
    return {} if arguments is None else arguments
