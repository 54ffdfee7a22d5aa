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
    (smolagents). Of an answer only its content and its tool calls count: reasoning need not come back.
    """
    return json.dumps(said(message), sort_keys=True, default=str)


def said(message: Message) -> dict[str, Any]:
    """What counts of a message, by name: equal for all its spellings."""
    role, content = message.get("role"), _text(message.get("content"))
    if role != "assistant":
        plain = {"role": role, "content": content}
        return plain | {name: value for name, value in message.items() if name not in plain and value is not None}
    calls = message.get("tool_calls") or ()
    if not calls and isinstance(content, str) and CALLS_AS_TEXT in content:
        content, calls = _calls_in(content)
    functions = [call.get("function") or {} for call in calls]
    return {
        "role": role,
        "content": _without_spaces(content) if isinstance(content, str) else content,
        "tool_calls": [[function.get("name"), parsed(function.get("arguments"))] for function in functions],
    }


def _without_spaces(text: str) -> Any:
    """What JSON says; any other text with one space for each run of white space."""
    value = parsed(text) if text.lstrip()[:1] in ("{", "[") else text
    return " ".join(value.split()) if isinstance(value, str) else value


def _calls_in(content: str) -> tuple[str, list[Message]]:
    """The text before calls that are written as a Python list, and these; all of the text if they cannot be read."""
    text, _, listed = content.rpartition(CALLS_AS_TEXT)
    try:
        calls = ast.literal_eval(listed.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return content, []
    are_calls = isinstance(calls, list) and all(isinstance(call, dict) and "function" in call for call in calls)
    return (text, calls) if are_calls else (content, [])


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
        except (json.JSONDecodeError, RecursionError):
            break
    return {} if arguments is None else arguments
