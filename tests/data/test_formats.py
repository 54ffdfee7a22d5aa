import json

import pyarrow as pa
import pytest

from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data import formats
from trinity_core.errors import DataError

SYSTEM, USER, ANSWER = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "3"}


def test_plaintext():
    form = FormatConfig(prompt_key="question", response_key="answer")
    row = {"question": "q", "answer": "a"}
    assert formats.prompt_messages(row, form) == [{"role": "user", "content": "q"}]
    assert formats.truth(row, form) == "a"
    assert formats.demonstration(row, form).messages[-1] == {"role": "assistant", "content": "a"}


def test_field_within_a_column_has_a_dot():
    row = {"prompt": [USER], "reward_model": {"ground_truth": "72", "style": "rule"}, "a.b": "whole"}
    form = FormatConfig(prompt_type="messages", messages_key="prompt", response_key="reward_model.ground_truth")
    assert formats.prompt_messages(row, form) == [USER]
    assert formats.truth(row, form) == "72"
    assert formats.truth(row, form.with_values({"response_key": "a.b"})) == "whole", "a column's own name comes first"
    assert formats.truth(row, form.with_values({"response_key": "reward_model.none"})) is None
    nested = FormatConfig(prompt_key="extra.question", response_key="extra.answer")
    assert formats.demonstration({"extra": {"question": "q", "answer": "a"}}, nested).messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    with pytest.raises(DataError, match=r"no column 'extra\.question'"):
        formats.prompt_messages({"extra": "text"}, nested)


def test_row_system_prompt_overrides_the_default():
    form = FormatConfig(system_prompt_key="sys", system_prompt="general")
    assert formats.prompt_messages({"prompt": "q", "sys": "own"}, form)[0] == {"role": "system", "content": "own"}
    assert formats.prompt_messages({"prompt": "q", "sys": ""}, form)[0]["content"] == "general"
    assert formats.prompt_messages({"prompt": "q"}, form)[0]["content"] == "general"


@pytest.mark.parametrize("encode", [lambda value: value, json.dumps])
def test_messages_as_list_or_text(encode):
    form = FormatConfig(prompt_type="messages", tools_key="tools")
    row = {"messages": encode([SYSTEM, USER, ANSWER, USER, ANSWER]), "tools": encode([{"name": "f"}])}
    assert formats.prompt_messages(row, form) == [SYSTEM, USER, ANSWER, USER]
    assert formats.truth(row, form) == "a"
    shown = formats.demonstration(row, form)
    assert shown.messages == [SYSTEM, USER, ANSWER, USER, ANSWER]
    assert shown.tools == [{"type": "function", "function": {"name": "f"}}] and not shown.every_turn
    form = form.with_values({"enable_concatenated_multi_turn": True})
    assert formats.demonstration(row, form).every_turn


def test_turns_are_messages():
    """As ShareGPT and those who copied it write them, with calls as LLaMA-Factory and Tool-N1 do."""
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": '{"b": 2}'}]
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(calls)},
        {"from": "observation", "value": {"found": 3}},
        {"from": "gpt", "value": "a"},
        {"from": "function_call", "value": "no call"},
        {"from": "function_call", "value": json.dumps({"name": "h"})},
    ]
    form = FormatConfig(prompt_type="messages", messages_key="conversations", system_prompt_key="system")
    row = {"conversations": turns, "system": "s"}
    system, *messages = formats.demonstration(row, form).messages
    assert system == {"role": "system", "content": "s"}
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", *["assistant"] * 3]
    assert [message["content"] for message in messages] == ["q", "", '{"found": 3}', "a", "no call", ""]
    made = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    assert made[1] == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    assert made[5] == [{"name": "h", "arguments": {}}] and not any(made[i] for i in (0, 2, 3, 4))
    assert formats.prompt_messages(row, form) == [system, *messages[:3]]
    better, worse = formats.preference(
        {"messages": turns[:1], "chosen": turns[3], "rejected": {"from": "gpt", "value": "b"}},
        FormatConfig(prompt_type="messages"),
    )
    assert [each.messages[-1]["content"] for each in (better, worse)] == ["a", "b"]


def test_turns_and_messages_of_one_parquet_file():
    """Arrow gives each all keys of the column."""
    kinds = [
        {"conversations": [{"from": "human", "value": "q"}]},
        {"conversations": [{"role": "user", "content": "q"}]},
    ]
    stored = pa.Table.from_pylist(kinds).to_pylist()
    assert "role" in stored[0]["conversations"][0] and "from" in stored[1]["conversations"][0]
    form = FormatConfig(prompt_type="messages", messages_key="conversations")
    assert [formats.prompt_messages(row, form) for row in stored] == [[{"role": "user", "content": "q"}]] * 2


def test_messages_with_a_system_prompt_keep_their_own():
    form = FormatConfig(prompt_type="messages", system_prompt="general")
    assert formats.prompt_messages({"messages": [SYSTEM, USER]}, form) == [SYSTEM, USER]
    general = {"role": "system", "content": "general"}
    assert formats.prompt_messages({"messages": [USER]}, form) == [general, USER]
    assert formats.demonstration({"messages": [USER, ANSWER]}, form).messages == [general, USER, ANSWER]
    whole, other = formats.preference({"messages": [USER], "chosen": [USER, ANSWER], "rejected": "x"}, form)
    assert whole.messages == [general, USER, ANSWER] and other.messages[:2] == [general, USER]


def test_messages_of_columnar_files_lose_their_nulls():
    form = FormatConfig(prompt_type="messages")
    row = {
        "messages": [{"role": "user", "content": "q", "tool_calls": None}, {**CALL, "content": None}, RESULT, ANSWER]
    }
    assert formats.demonstration(row, form).messages == [{"role": "user", "content": "q"}, CALL, RESULT, ANSWER]


@pytest.mark.parametrize(
    "chosen, rejected",
    [
        ("yes", "no"),
        ({"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}),
        ([{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]),
        ([USER, {"role": "assistant", "content": "yes"}], [USER, {"role": "assistant", "content": "no"}]),
    ],
)
def test_preferences_in_messages(chosen, rejected):
    form = FormatConfig(prompt_type="messages")
    better, worse = formats.preference({"messages": [USER], "chosen": chosen, "rejected": rejected}, form)
    assert better.messages == [USER, {"role": "assistant", "content": "yes"}]
    assert worse.messages == [USER, {"role": "assistant", "content": "no"}]


def test_preferences_in_plaintext():
    form = FormatConfig(prompt_key="q", chosen_key="good", rejected_key="rejected", system_prompt="s")
    better, worse = formats.preference({"q": "q", "good": "yes", "rejected": "no"}, form)
    assert [m["content"] for m in better.messages] == ["s", "q", "yes"]
    assert [m["content"] for m in worse.messages] == ["s", "q", "no"]


@pytest.mark.parametrize(
    "row, form, message",
    [
        ({"question": "q"}, {}, r"no column 'prompt' \(format.prompt_key\); its columns are question"),
        ({"prompt": ""}, {}, "column 'prompt' must hold text, not ''"),
        ({"prompt": None}, {}, "must hold text, not nothing"),
        ({"prompt": 3}, {}, "must hold text, not 3"),
        ({"messages": "hello"}, {"prompt_type": "messages"}, "must hold a list of messages, not 'hello'"),
        ({"messages": "[{"}, {"prompt_type": "messages"}, "looks like JSON but cannot be read"),
        ({"messages": "[" * 99999}, {"prompt_type": "messages"}, "cannot be read: it is nested more than 64 levels"),
        ({"messages": r'[{"role": "user", "content": "\ud83d"}]'}, {"prompt_type": "messages"}, "half of a character"),
        ({"messages": [{"content": "x"}]}, {"prompt_type": "messages"}, "a role and content"),
        ({"messages": [{"role": "user"}]}, {"prompt_type": "messages"}, "a message without content"),
        ({"messages": [ANSWER]}, {"prompt_type": "messages"}, "has no message to answer"),
        ({"messages": [{"from": "bot", "value": ""}]}, {"prompt_type": "messages"}, "a turn from 'bot', not one of sy"),
        ({"messages": [{"from": ["gpt"]}]}, {"prompt_type": "messages"}, r"a turn from \['gpt'\], not one of system"),
        ({"messages": [{"from": "gpt"}]}, {"prompt_type": "messages"}, "a message without content"),
    ],
)
def test_unusable_prompts_are_refused(row, form, message):
    with pytest.raises(DataError, match=message):
        formats.prompt_messages(row, FormatConfig(**form))


def test_unusable_demonstrations_are_refused():
    form = FormatConfig(prompt_type="messages", tools_key="tools")
    with pytest.raises(DataError, match="no assistant's answer"):
        formats.demonstration({"messages": [USER]}, form)
    with pytest.raises(DataError, match="hold the same answer"):
        formats.preference({"messages": [USER], "chosen": "x", "rejected": "x"}, form)
    with pytest.raises(DataError, match="must end with an assistant's message"):
        formats.preference({"messages": [USER], "chosen": [USER], "rejected": "x"}, form)
    with pytest.raises(DataError, match="list of objects, one a tool"):
        formats.tools({"tools": [1]}, form)
