"""Converts rows to conversations: the meaning of the columns named by a `FormatConfig`.

`plaintext` rows hold strings: a prompt, a response. `messages` rows hold lists of messages (`role`, `content`, perhaps
`tool_calls`) or of turns (`from`, `value`), as a list or as its JSON text. Both may have a system prompt. Tools are a
list of objects or of their JSON texts, or its JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data.messages import (
    WEIGHT,
    Message,
    column_error,
    is_empty,
    is_turn,
    read_message,
    short,
    without_weight,
)
from trinity_core.data.values import json_problem, row_problem, without_absent

Row = Mapping[str, Any]
ALPACA_PROMPT, ALPACA_INPUT, ALPACA_HISTORY = "instruction", "input", "history"
MEDIA = {"<image>": ("images", "image"), "<video>": ("videos", "video"), "<audio>": ("audios", "audio")}
"""Marks in a text -> columns of the files that belong there, in LlamaFactory's and veRL's data."""
SYSTEM_ROLES = ("system", "developer")
_PYTHON = re.compile(r"\[\s*\{\s*'(role|content)'\s*:.*\}\s*\]", re.DOTALL)
"""Matches a list of messages as Python text, as CSV and SQL hold it."""
_BEGUN = re.compile(r'\s*\[?\s*\{\s*"(role|content)"\s*:')
"""Matches the beginning of messages as JSON text."""
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages ending with an answer to imitate, prefer or reject."""

    messages: list[Message]
    tools: list[Tool] | None = None
    every_turn: bool = False
    """True if every answer of the conversation carries loss, not only the last."""
    unlearned: frozenset[int] = frozenset()
    """Positions of answers that carry no loss in any case."""
    text: str | None = None
    """A text without roles, all of which carries loss, in place of messages."""

    @property
    def learned_turns(self) -> list[int]:
        """Positions of the answers that carry loss."""
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [index for index in (answers if self.every_turn else answers[-1:]) if index not in self.unlearned]


def prompt_messages(row: Row, form: FormatConfig) -> list[Message]:
    """Return the conversation that a policy continues; trailing answers of a `messages` row are dropped.

    Raises DataError if the column is missing or has the wrong type.
    """
    if form.prompt_type == "plaintext":
        prompt = [*_system(row, form), {"role": "user", "content": _plain_prompt(row, form)}]
        return _only_text(row, prompt, form.prompt_key)
    messages = _messages(row, form.messages_key)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise column_error(form.messages_key, "has no message to answer")
    messages = _only_text(row, messages, form.messages_key)
    return [without_weight(message) for message in _with_system_prompt(messages, row, form)]


def has_prompt(row: Row, form: FormatConfig) -> bool:
    """True if the row has a prompt. Null counts as none: tables have every column in every row."""
    return _optional(row, form.prompt_key if form.prompt_type == "plaintext" else form.messages_key) is not None


def truth(row: Row, form: FormatConfig) -> Any:
    """Return the reference answer: the response column, else the answer that ends a `messages` row, else None."""
    if has_column(row, form.response_key):
        return column(row, form.response_key)
    if form.prompt_type == "messages" and has_prompt(row, form):
        last = _messages(row, form.messages_key)[-1]
        return last.get("content") if last["role"] == "assistant" else None
    return None


def tools(row: Row, form: FormatConfig) -> list[Tool] | None:
    """Return the tools of a row, None if it has none. A bare function is wrapped as chat templates expect it."""
    listed = _parsed(_optional(row, form.tools_key), form.tools_key)
    if not listed:
        return None
    if isinstance(listed, list):
        listed = [_parsed(tool, form.tools_key) for tool in listed]
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise column_error(form.tools_key, "must hold a list of objects, one a tool")
    return [{"type": "function", "function": tool} if "name" in tool else tool for tool in listed]


def demonstration(row: Row, form: FormatConfig) -> Conversation:
    """Return a row of a supervised data set, whose last message is the answer. Raises DataError if there is no
    answer."""
    if form.prompt_type == "text":
        return Conversation([], text=_text(row, form.text_key, "text_key"))
    if form.prompt_type == "plaintext":
        answer = {"role": "assistant", "content": _text(row, form.response_key, "response_key")}
        return Conversation([*prompt_messages(row, form), answer], tools(row, form))
    messages = _messages(row, form.messages_key)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if len(messages) < 2:
        raise column_error(form.messages_key, "has no assistant's answer to learn from")
    messages = _with_system_prompt(_only_text(row, messages, form.messages_key), row, form)
    unlearned = frozenset(index for index, message in enumerate(messages) if message.get(WEIGHT) == 0)
    plain, every_turn = [without_weight(message) for message in messages], form.enable_concatenated_multi_turn
    conversation = Conversation(plain, tools(row, form), every_turn, unlearned)
    if not conversation.learned_turns:
        which = "every answer" if every_turn else "the last answer, the only one that carries loss,"
        raise column_error(form.messages_key, f"gives {which} weight 0, so there is nothing to learn")
    if any(is_empty(plain[turn]) for turn in conversation.learned_turns):
        raise column_error(form.messages_key, "has an empty answer, from which there is nothing to learn")
    return conversation


def preference(row: Row, form: FormatConfig) -> tuple[Conversation, Conversation]:
    """Return the chosen and the rejected conversation of a row of a preference data set.

    In `messages` rows the two answers may be whole conversations (prompt included), lists of the messages after the
    prompt, one message, or a string. The loss is on the last answers. Raises DataError if a column is missing, the
    answers are equal, or the messages before them differ.
    """
    pair = tuple(
        Conversation(_preferred(row, form, key, setting), tools(row, form))
        for key, setting in ((form.chosen_key, "chosen_key"), (form.rejected_key, "rejected_key"))
    )
    chosen, rejected = (conversation.messages for conversation in pair)
    columns = f"columns '{form.chosen_key}' and '{form.rejected_key}'"
    if chosen == rejected:
        raise DataError(f"{columns} hold the same answer", key=form.chosen_key)
    if chosen[:-1] != rejected[:-1]:
        earlier = zip_longest(chosen[:-1], rejected[:-1])
        differing = next(number for number, (left, right) in enumerate(earlier, 1) if left != right)
        raise DataError(
            f"{columns} differ in message {differing} already, but the loss is only on their last answers; "
            "give pairs that answer the same conversation",
            key=form.chosen_key,
        )
    return pair[0], pair[1]


def _preferred(row: Row, form: FormatConfig, key: str, setting: str) -> list[Message]:
    if form.prompt_type == "plaintext":
        return [*prompt_messages(row, form), {"role": "assistant", "content": _text(row, key, setting)}]
    value = _column(row, key, setting)
    if isinstance(value, str) and not _holds_messages(value):
        value = {"role": "assistant", "content": value}
    value = _parsed(value, key)
    answer = _checked([value] if isinstance(value, dict) else value, key)
    if answer[-1]["role"] != "assistant":
        raise column_error(key, "must end with an assistant's message")
    if answer[-1].get(WEIGHT) == 0:
        raise column_error(key, "ends with an answer of weight 0, so there is nothing to prefer")
    if is_empty(answer[-1]):
        raise column_error(key, "ends with an empty answer")
    plain = [without_weight(message) for message in answer]
    if plain[0]["role"] in (*SYSTEM_ROLES, "user"):
        return _with_system_prompt(_only_text(row, plain, key), row, form)
    return prompt_messages(row, form) + plain


def _only_text(row: Row, messages: list[Message], key: str) -> list[Message]:
    """Return the messages. Raises DataError if a mark in them stands for a file in another column of the row."""
    for mark, columns in MEDIA.items():
        files = next((name for name in columns if row.get(name)), None)
        if files and any(mark in str(message.get("content")) for message in messages):
            raise column_error(key, f"has {mark} for a file in column '{files}'; models only see text")
    return messages


def _plain_prompt(row: Row, form: FormatConfig) -> str:
    """Return the prompt of a plaintext row, followed by an empty line and its input if it has one."""
    prompt = _text(row, form.prompt_key, "prompt_key")
    whole = prompt.strip()
    if whole.startswith("[") and whole.endswith("]") and (_PYTHON.fullmatch(whole) or _holds_messages(whole)):
        raise column_error(form.prompt_key, "holds a list of messages; write prompt_type: messages and messages_key")
    if form.prompt_key == ALPACA_PROMPT and _is_history(row.get(ALPACA_HISTORY)):
        raise column_error(
            ALPACA_HISTORY, "holds earlier turns, which are read only from messages (format.messages_key)"
        )
    key = form.input_key or (ALPACA_INPUT if form.prompt_key == ALPACA_PROMPT else None)
    if key is None or (form.input_key is None and not has_column(row, key)):
        return prompt
    text = _column(row, key, "input_key")
    if text is not None and not isinstance(text, str):
        raise column_error(key, f"(format.input_key) must hold text, not {short(text)}")
    return f"{prompt}\n\n{text}" if text and text.strip() else prompt


def _is_history(value: Any) -> bool:
    """True for LlamaFactory's earlier turns, pairs of a question and its answer."""
    return isinstance(value, list) and any(isinstance(turn, list) and len(turn) == 2 for turn in value)


def _system(row: Row, form: FormatConfig) -> list[Message]:
    text = _optional(row, form.system_prompt_key) or form.system_prompt
    return [{"role": "system", "content": str(text)}] if text else []


def _with_system_prompt(messages: list[Message], row: Row, form: FormatConfig) -> list[Message]:
    """Prepend the row's system prompt to messages without one."""
    return messages if messages[0]["role"] in SYSTEM_ROLES else [*_system(row, form), *messages]


def _optional(row: Row, key: str | None) -> Any:
    return column(row, key) if key and has_column(row, key) else None


def unread_columns(rows: Sequence[Row], form: FormatConfig) -> list[str]:
    """Return notices about optional columns that are configured but in no row."""
    keys = {"tools_key": form.tools_key, "system_prompt_key": form.system_prompt_key}
    return [
        f"no row has a column '{key}' (format.{setting})"
        for setting, key in keys.items()
        if key and not any(has_column(row, key) for row in rows)
    ]


def spare_columns(rows: Sequence[Row], form: FormatConfig, is_pair: bool) -> list[str]:
    """Return columns of supervised rows that nothing reads, sorted; `is_pair`: the rows are preferences."""
    keys = [form.system_prompt_key, form.tools_key]
    if form.prompt_type != "plaintext":
        keys.append(form.messages_key if form.prompt_type == "messages" else form.text_key)
    else:
        keys += [form.prompt_key, form.input_key or (ALPACA_INPUT if form.prompt_key == ALPACA_PROMPT else None)]
    if is_pair:
        keys += [form.chosen_key, form.rejected_key]
    elif form.prompt_type == "plaintext":
        keys.append(form.response_key)
    read = {part for key in keys if key for part in (key, key.partition(".")[0])}
    return sorted({str(name) for row in rows for name in row} - read)


def has_column(row: Row, key: str) -> bool:
    """True if a row has this column, or this field within one (`reward_model.ground_truth`), an object or its JSON."""
    name, _, inner = key.partition(".")
    return key in row or (bool(inner) and has_column(_fields(row.get(name)), inner))


def column(row: Row, key: str) -> Any:
    """Return the value of a column, or of a field within one. Raises KeyError if there is none."""
    if key in row:
        return row[key]
    name, _, inner = key.partition(".")
    return column(_fields(row[name]), inner)


def _fields(value: Any) -> Row:
    """Return the fields of a column that holds an object, or its JSON text; empty for others."""
    if isinstance(value, str):
        with suppress(DataError):
            value = _parsed(value, None)
    return value if isinstance(value, Mapping) else {}


def _column(row: Row, key: str, setting: str) -> Any:
    if not has_column(row, key):
        raise DataError(
            f"there is no column '{key}' (format.{setting}); its columns are {', '.join(map(str, row))}", key=key
        )
    return column(row, key)


def _text(row: Row, key: str, setting: str) -> str:
    value = _column(row, key, setting)
    if not isinstance(value, str) or not value.strip():
        raise column_error(key, f"must hold text, not {short(value)}")
    return value


def _messages(row: Row, key: str) -> list[Message]:
    return _checked(_parsed(_column(row, key, "messages_key"), key), key)


def _checked(messages: Any, key: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise column_error(key, f"must hold a list of messages, not {short(messages)}")
    return [read_message(message, key) for message in messages]


def _holds_messages(text: str) -> bool:
    """True for JSON of messages or turns, possibly cut off; False for an answer that merely begins with a bracket."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return _BEGUN.match(text) is not None
    objects = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(item, dict) for item in objects):
        return False
    return bool(objects) and all("role" in item or (is_turn(item) and "value" in item) for item in objects)


def _parsed(value: Any, key: str | None) -> Any:
    """Return messages, tools or fields without absent keys, parsed if they are JSON text: columnar files have no type
    for lists of different objects."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return without_absent(value)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise column_error(key, f"looks like JSON but cannot be read: it {json_problem(error)}") from error
    if reason := row_problem(parsed):
        raise column_error(key, reason)
    return without_absent(parsed)
