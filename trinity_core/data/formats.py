"""From rows to conversations: what the columns named by a `FormatConfig` mean.

`plaintext` rows hold strings: a prompt, a response. `messages` rows hold lists of messages (`role`, `content`, perhaps
`tool_calls`) or of turns (`from`, `value`), as a list or as its JSON text. Both may have a system prompt. Tools are a
list of objects or its JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data import sharegpt
from trinity_core.data.row_validation import json_problem, row_problem
from trinity_core.errors import DataError

Row = Mapping[str, Any]
Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages ending with an answer to imitate, prefer or reject."""

    messages: list[Message]
    tools: list[Tool] | None = None
    every_turn: bool = False
    """Loss on every answer of the conversation, not on the last alone."""


def prompt_messages(row: Row, form: FormatConfig) -> list[Message]:
    """The conversation a policy continues; trailing answers of a `messages` row are dropped.

    Raises DataError if the column is missing or has the wrong type.
    """
    if form.prompt_type == "plaintext":
        return [*_system(row, form), {"role": "user", "content": _text(row, form.prompt_key, "prompt_key")}]
    messages = _messages(row, form.messages_key, "messages_key")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"column '{form.messages_key}' has no message to answer")
    return _begun(messages, row, form)


def truth(row: Row, form: FormatConfig) -> Any:
    """The reference answer: the response column, else the answer that ends a `messages` row, else None."""
    if has_column(row, form.response_key):
        return column(row, form.response_key)
    if form.prompt_type == "messages":
        last = _messages(row, form.messages_key, "messages_key")[-1]
        return last.get("content") if last["role"] == "assistant" else None
    return None


def tools(row: Row, form: FormatConfig) -> list[Tool] | None:
    """The tools of a row, None if it has none. A bare function is wrapped as chat templates take it."""
    given = row.get(form.tools_key) if form.tools_key else None
    given = _parsed(given, form.tools_key)
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise DataError(f"column '{form.tools_key}' must hold a list of objects, one a tool")
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in given]


def demonstration(row: Row, form: FormatConfig) -> Conversation:
    """A row of a supervised data set, whose last message is the answer. Raises DataError if there is no answer."""
    if form.prompt_type == "plaintext":
        answer = {"role": "assistant", "content": _text(row, form.response_key, "response_key")}
        return Conversation([*prompt_messages(row, form), answer], tools(row, form))
    messages = _messages(row, form.messages_key, "messages_key")
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if len(messages) < 2:
        raise DataError(f"column '{form.messages_key}' has no assistant's answer to learn from")
    return Conversation(_begun(messages, row, form), tools(row, form), form.enable_concatenated_multi_turn)


def preference(row: Row, form: FormatConfig) -> tuple[Conversation, Conversation]:
    """The preferred and the other conversation of a row of a preference data set.

    In `messages` rows the two answers may be whole conversations (prompt included), lists of the messages after the
    prompt, one message, or a string. Raises DataError if a column is missing or the answers are equal.
    """
    pair = tuple(
        Conversation(_preferred(row, form, key, setting), tools(row, form))
        for key, setting in ((form.chosen_key, "chosen_key"), (form.rejected_key, "rejected_key"))
    )
    if pair[0].messages == pair[1].messages:
        raise DataError(f"columns '{form.chosen_key}' and '{form.rejected_key}' hold the same answer")
    return pair[0], pair[1]


def _preferred(row: Row, form: FormatConfig, key: str, setting: str) -> list[Message]:
    if form.prompt_type == "plaintext":
        return [*prompt_messages(row, form), {"role": "assistant", "content": _text(row, key, setting)}]
    value = _parsed(_column(row, key, setting), key)
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    answer = _checked([value] if isinstance(value, dict) else value, key)
    if answer[-1]["role"] != "assistant":
        raise DataError(f"column '{key}' must end with an assistant's message")
    if answer[0]["role"] in ("system", "user"):
        return _begun(answer, row, form)
    return prompt_messages(row, form) + answer


def _system(row: Row, form: FormatConfig) -> list[Message]:
    text = row.get(form.system_prompt_key) if form.system_prompt_key else None
    text = text or form.system_prompt
    return [{"role": "system", "content": str(text)}] if text else []


def _begun(messages: list[Message], row: Row, form: FormatConfig) -> list[Message]:
    """With the system prompt before messages that have none."""
    return messages if messages[0]["role"] == "system" else [*_system(row, form), *messages]


def has_column(row: Row, key: str) -> bool:
    """Whether a row has this column, or this field within one (`reward_model.ground_truth`)."""
    name, _, inner = key.partition(".")
    return key in row or (bool(inner) and isinstance(row.get(name), Mapping) and has_column(row[name], inner))


def column(row: Row, key: str) -> Any:
    """The value of a column, or of a field within one. Raises KeyError where there is none."""
    if key in row:
        return row[key]
    name, _, inner = key.partition(".")
    return column(row[name], inner)


def _column(row: Row, key: str, setting: str) -> Any:
    if not has_column(row, key):
        raise DataError(f"there is no column '{key}' (format.{setting}); its columns are {', '.join(map(str, row))}")
    return column(row, key)


def _text(row: Row, key: str, setting: str) -> str:
    value = _column(row, key, setting)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column '{key}' must hold text, not {_short(value)}")
    return value


def _messages(row: Row, key: str, setting: str) -> list[Message]:
    return _checked(_parsed(_column(row, key, setting), key), key)


def _checked(messages: Any, key: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"column '{key}' must hold a list of messages, not {_short(messages)}")
    messages = [
        sharegpt.as_message(each, key) if isinstance(each, dict) and sharegpt.is_turn(each) else each
        for each in messages
    ]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"column '{key}' must hold messages with a role and content, not {_short(message)}")
        if not (isinstance(message.get("content"), str | list) or message.get("tool_calls")):
            raise DataError(f"column '{key}' has a message without content: {_short(message)}")
    # Columnar files give every message every key; a null means that the key was absent.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _parsed(value: Any, key: str | None) -> Any:
    """Lists are also accepted as JSON text: columnar files have no type for lists of unlike objects."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"column '{key}' looks like JSON but cannot be read: it {json_problem(error)}") from error
    if reason := row_problem(parsed):
        raise DataError(f"column '{key}' {reason}")
    return parsed


def _short(value: Any, limit: int = 60) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
