"""Normalises messages of data sets, in any dialect of OpenAI's API, for chat templates.

Text in parts becomes one text. Arguments of tool calls in JSON become objects: a template that writes them as JSON
would encode them twice. Other spellings of the same message are recognised.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.data.values import json_problem

ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
"""The speaker of a ShareGPT turn -> role of a message."""
SPEAKERS = {speaker: role for speaker, role in ROLES.items() if speaker != "function_call"} | {
    "ipython": "tool",
    "prompter": "user",
}
"""Names, in any case, that a message may have as its role, ShareGPT's, Llama's and OpenAssistant's."""
Message = dict[str, Any]
WEIGHT = "weight"
"""OpenAI's key for whether an answer carries loss: 0 or 1."""
WEIGHTS = (WEIGHT, "loss_mask", "train", "training", "trainable", "loss", "loss_scale")
"""Names of that key, in OpenAI's, LlamaFactory's, axolotl's, veRL's and ms-swift's data."""
IN_PART = ("train_detail", "training_detail")
"""axolotl's keys for the characters of an answer that carry loss."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's thoughts: in the templates of Qwen and DeepSeek, in OpenAI's clients, and in the templates of
gpt-oss and LFM."""
TEXTS = ("text", "input_text", "output_text")
CALLS_AS_TEXT = "Calling tools:"
"""Text that smolagents writes before the calls of an answer, a Python list."""


def column_error(key: str | None, problem: str) -> DataError:
    return DataError(f"column '{key}' {problem}", key=key or "")


def is_turn(raw: Mapping[str, Any]) -> bool:
    """True for a ShareGPT turn, False for a message. Parquet gives both all keys of the column, null if absent."""
    return raw.get("from") is not None and raw.get("role") is None


def as_message(turn: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Convert a turn to a message. Calls in a turn `function_call` become `tool_calls`, as chat templates expect.

    Raises DataError, which names the column `key`, for an unknown speaker.
    """
    speaker, value = turn["from"], turn.get("value")
    others = {name: turn[name] for name in (*WEIGHTS, *IN_PART) if name in turn}
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise column_error(key, f"has a turn from {speaker!r:.80}, not one of {', '.join(ROLES)}")
    if speaker == "function_call" and (calls := _turn_calls(value)):
        return {"role": "assistant", "content": "", "tool_calls": calls, **others}
    content = value if value is None or isinstance(value, str) else json.dumps(value)
    return {"role": ROLES[speaker], "content": content, **others}


def _turn_calls(value: Any) -> list[dict[str, Any]]:
    """Return the calls in a turn: an object with `name` and `arguments`, a list of them, or their JSON; else none."""
    parsed = _read(value)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": _read(call.get("arguments") or {})}}
        for call in calls
    ]


def _read(value: Any) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_message(raw: Any, key: str) -> Message:
    """Return the message, with its `weight` if it has one. Raises DataError, which names the column `key`, if it is
    invalid."""
    if isinstance(raw, Mapping) and is_turn(raw):
        raw = as_message(raw, key)
    if not isinstance(raw, Mapping) or not isinstance(raw.get("role"), str):
        raise column_error(key, f"must hold messages with a role and content, not {short(raw)}")
    # Columnar files give every message every key; null means that the key was absent, and so does an empty list of
    # calls,
    # which templates would treat as an answer that calls tools.
    message = {name: value for name, value in raw.items() if value is not None and (value or name != "tool_calls")}
    if "function_call" in message:  # the older form of tool calls, with only one
        message.setdefault("tool_calls", [message["function_call"]])
        del message["function_call"]
    role = message["role"].strip().lower()
    message["role"] = "tool" if role == "function" else SPEAKERS.get(role, message["role"])
    if message["role"] == "assistant" and (thoughts := thoughts_of(message)):
        if not isinstance(thoughts, str):
            raise column_error(key, f"has an answer whose thoughts are not text: {short(thoughts)}")
        if not (message.get("content") and (message.get("tool_calls") or "</think>" in str(message["content"]))):
            # under every name, as each template reads its own; but the text may hold them already, and gpt-oss's
            # template
            # refuses a call with both
            message.update(dict.fromkeys(THOUGHTS, thoughts))
    if message.get("tool_calls"):
        message["tool_calls"] = _calls(message["tool_calls"], key)
    elif not isinstance(message.get("content"), str | list):
        raise column_error(key, f"has a message without content: {short(raw)}")
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], key)
    if message["role"] == "user" and not message["content"].strip():
        raise column_error(key, "has a user's message without text")
    return _weighted(message, key)


def thoughts_of(message: Mapping[str, Any]) -> Any:
    """Return the thoughts of an answer from their separate field, under any name; None if there are none."""
    return next((message[name] for name in THOUGHTS if message.get(name)), None)


def without_weight(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != WEIGHT}


def with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON text, as in OpenAI's API."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}


def short(value: Any, limit: int = 60) -> str:
    """Format a value for a message to the user."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def is_empty(message: Message) -> bool:
    """True for an answer without text, thoughts and calls."""
    return not (str(message.get("content") or "").strip() or thoughts_of(message) or message.get("tool_calls"))


def _weighted(message: Message, key: str) -> Message:
    """Return the message with its weight, if it has one, under OpenAI's name."""
    if spans := next((name for name in IN_PART if message.get(name)), None):
        raise column_error(key, f"has a message with {spans}; an answer carries loss as a whole or not at all")
    weights = {name: message[name] for name in WEIGHTS if name in message}
    if not weights:
        return message
    name, weight = next(iter(weights.items()))
    if not all(isinstance(number, int | float) and number in (0, 1) for number in weights.values()):
        raise column_error(key, f"has a message of {name} {short(weight)}; that is 0 or false (no loss), or 1 or true")
    if any(number != weight for number in weights.values()):
        raise column_error(key, f"has a message with different values of {' and '.join(weights)}")
    if weight and message["role"] != "assistant":
        raise column_error(key, f"has a {message['role']} message of {name} {weight}; only answers carry loss")
    return {**{name: value for name, value in message.items() if name not in weights}, WEIGHT: int(weight)}


def _joined(parts: Sequence[Any], key: str) -> str:
    """Join text parts as vLLM's server does."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") in TEXTS else part
        if not isinstance(text, str):
            raise column_error(key, f"has a message with {short(part)} in its content; models only see text")
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, key: str) -> list[dict[str, Any]]:
    """Return tool calls, each with its `function` and an object of arguments."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise column_error(key, f"has tool_calls that cannot be read: the text {json_problem(error)}") from error
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise column_error(key, f"has tool_calls that are not a list of objects: {short(calls)}")
    calls = [{"type": "function", "function": dict(call)} if "name" in call else dict(call) for call in calls]
    for call in calls:
        if not isinstance(call.get("function"), Mapping) or not isinstance(call["function"].get("name"), str):
            raise column_error(key, f"has tool_calls without the name of a function: {short(call)}")
    return [
        {**call, "function": {**call["function"], "arguments": _object(call["function"].get("arguments"), key)}}
        for call in calls
    ]


def _object(arguments: Any, key: str) -> dict[str, Any]:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            reason = json_problem(error)
            raise column_error(key, f"has a tool call whose arguments cannot be read: the text {reason}") from error
    if not isinstance(arguments, Mapping):
        raise column_error(key, f"has a tool call whose arguments are not an object: {short(arguments)}")
    return dict(arguments)


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", ""), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def canonical(message: Mapping[str, Any]) -> str:
    """Return a string that is equal for all spellings of a message.

    Clients send an answer back with or without empty fields, its content as text or as parts, with other white space,
    and if it is JSON with another order of keys; a tool's arguments as an object or as JSON within JSON; calls as text
    (smolagents). Only an answer's content and tool calls count: reasoning need not come back. A message that JSON
    cannot hold in this form, such as one nested too deeply, equals only itself.
    """
    try:
        return json.dumps(said(message), sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(message)


def said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a message that determine its meaning, by name: equal for all spellings."""
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
    """Return name and arguments of a call; a malformed one is compared unchanged."""
    function = (call.get("function") or {}) if isinstance(call, Mapping) else None
    return [function.get("name"), parsed(function.get("arguments"))] if isinstance(function, Mapping) else call


def _without_spaces(text: str) -> Any:
    """Return the parsed JSON; for other text, the text with white space collapsed."""
    value = parsed(text) if text.lstrip()[:1] in ("{", "[") else text
    return " ".join(value.split()) if isinstance(value, str) else value


def _calls_in(content: str) -> tuple[str, list[Message]]:
    """Return the text before calls written as a Python list, and the calls; all of the text if they cannot be
    parsed."""
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
    """Return the arguments of a call as an object, or their text if it is not JSON."""
    while isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):  # no JSON; more than 4300 digits; too deep
            break
    return {} if arguments is None else arguments
