import json

import pyarrow as pa
import pytest
from raising import raising

from trinity_core.base.errors import DataError
from trinity_core.config.schema.buffer import FormatConfig
from trinity_core.data import formats

SYSTEM, USER, ANSWER = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "3"}


def test_plaintext():
    form = FormatConfig(prompt_key="question", response_key="answer")
    row = {"question": "q", "answer": "a"}
    assert formats.prompt_messages(row, form) == [{"role": "user", "content": "q"}]
    assert formats.truth(row, form) == "a"
    assert formats.demonstration(row, form).messages[-1] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "value, key, truth",
    [
        ('{"style": "rule", "ground_truth": "3"}', "reward_model.ground_truth", "3"),
        ('{"ground_truth": {"target": 3}}', "reward_model.ground_truth.target", 3),
        ({"ground_truth": '{"target": 3}'}, "reward_model.ground_truth.target", 3),
        ('{"style": "rule"}', "reward_model.ground_truth", None),
        ('{"ground_truth": ', "reward_model.ground_truth", None),
        ("ground_truth", "reward_model.ground_truth", None),
        ("[1]", "reward_model.ground_truth", None),
        (None, "reward_model.ground_truth", None),
    ],
)
def test_a_field_may_be_within_json_text(value, key, truth):
    assert formats.truth({"reward_model": value}, FormatConfig(response_key=key)) == truth


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
    with raising(DataError, key="extra.question"):
        formats.prompt_messages({"extra": "text"}, nested)


@pytest.mark.parametrize("kind, key", [("plaintext", "prompt"), ("messages", "messages")])
def test_a_row_may_lack_its_prompt(kind, key):
    """Tables have null for a missing value."""
    form = FormatConfig(prompt_type=kind)
    for row in ({"goal": 3}, {"goal": 3, key: None}):
        assert not formats.has_prompt(row, form) and formats.truth(row, form) is None
        assert formats.truth({**row, "response": 4}, form) == 4
        with pytest.raises(DataError):
            formats.prompt_messages(row, form)


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
    """As written by ShareGPT and its imitators, with calls as in LLaMA-Factory and Tool-N1."""
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
    functions = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    assert functions[1] == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": 2}}]
    assert functions[5] == [{"name": "h", "arguments": {}}] and not any(functions[i] for i in (0, 2, 3, 4))
    assert formats.prompt_messages(row, form) == [system, *messages[:3]]
    better, worse = formats.preference(
        {"messages": turns[:1], "chosen": turns[3], "rejected": {"from": "gpt", "value": "b"}},
        FormatConfig(prompt_type="messages"),
    )
    assert [conversation.messages[-1]["content"] for conversation in (better, worse)] == ["a", "b"]


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
        (json.dumps([{"role": "assistant", "content": "yes"}]), "no"),
    ],
)
def test_preferences_in_messages(chosen, rejected):
    form = FormatConfig(prompt_type="messages")
    better, worse = formats.preference({"messages": [USER], "chosen": chosen, "rejected": rejected}, form)
    assert better.messages == [USER, {"role": "assistant", "content": "yes"}]
    assert worse.messages == [USER, {"role": "assistant", "content": "no"}]


@pytest.mark.parametrize("text", ["[0, 1) is it.", "{x : x > 0}", "[1, 2]", '{"city": "Rome"}', '{"from": "a"}', "[]"])
def test_a_preferred_text_may_look_like_json(text):
    form = FormatConfig(prompt_type="messages")
    better, _ = formats.preference({"messages": [USER], "chosen": text, "rejected": "no"}, form)
    assert better.messages == [USER, {"role": "assistant", "content": text}]


def test_an_empty_list_of_calls_is_no_call():
    """As logged by clients of the API; templates that test for the key would take it for a call."""
    form = FormatConfig(prompt_type="messages")
    row = {"messages": [USER, {"role": "assistant", "content": "yes", "tool_calls": []}]}
    assert formats.demonstration(row, form).messages == [USER, {"role": "assistant", "content": "yes"}]


def test_unusable_demonstrations_are_refused():
    form = FormatConfig(prompt_type="messages", tools_key="tools")
    with raising(DataError, key="messages"):
        formats.demonstration({"messages": [USER]}, form)
    for chosen in ("x", [USER], '[{"role": "assistant", "content": "cut'):
        with raising(DataError, key="chosen"):
            formats.preference({"messages": [USER], "chosen": chosen, "rejected": "x"}, form)
    for wrong in ([1], ["f"], ["{"], json.dumps({"name": "f"})):
        with raising(DataError, key="tools"):
            formats.tools({"tools": wrong}, form)


def test_columns_that_rows_may_lack_are_told_if_none_has_them():
    form = FormatConfig(tools_key="extra.tools", system_prompt_key="sys")
    some = [{"prompt": "q"}, {"prompt": "q", "extra": {"tools": [{"name": "f"}]}, "sys": "s"}]
    assert formats.unread_columns(some, form) == [] and formats.unread_columns([], FormatConfig()) == []
    [tools, system] = formats.unread_columns(some[:1], form)
    assert "format.tools_key" in tools and "format.system_prompt_key" in system
    assert formats.tools(some[1], form) == [{"type": "function", "function": {"name": "f"}}]
    assert formats.prompt_messages(some[1], form)[0] == {"role": "system", "content": "s"}
    assert formats.tools(some[0], form) is None


MESSAGES = FormatConfig(prompt_type="messages")
EVERY_TURN = FormatConfig(prompt_type="messages", enable_concatenated_multi_turn=True)


def arguments_of(message):
    return [call["function"]["arguments"] for call in message["tool_calls"]]


def calling(*arguments):
    """An answer that calls tools with these arguments."""
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": value}} for value in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_arguments_of_calls_may_be_json_text():
    """As in OpenAI's API; chat templates encode what they are given."""
    calls = calling('{"a": [1, null]}', {"a": "{}"}, "", None)
    [_, answer] = formats.demonstration({"messages": [USER, calls]}, MESSAGES).messages
    assert arguments_of(answer) == [{"a": [1, None]}, {"a": "{}"}, {}, {}]
    assert {call["id"] for call in answer["tool_calls"]} == {"c"}
    as_text = {**calls, "tool_calls": json.dumps(calls["tool_calls"])}
    assert formats.demonstration({"messages": [USER, as_text]}, MESSAGES).messages[1] == answer
    asked = formats.prompt_messages({"messages": [USER, calls, RESULT]}, MESSAGES)
    assert asked[1] == answer


def test_a_call_without_function_around_it_gets_it():
    bare = {"name": "f", "arguments": '{"a": 1}'}
    wrapped = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    demonstration = formats.demonstration({"messages": [USER, {"role": "assistant", "tool_calls": [bare]}]}, MESSAGES)
    assert demonstration.messages[1]["tool_calls"] == [wrapped]
    legacy = {"role": "assistant", "content": None, "function_call": bare}
    result = {"role": "function", "name": "f", "content": "3"}
    demonstration = formats.demonstration({"messages": [USER, legacy, result, ANSWER]}, MESSAGES)
    assert demonstration.messages[1:3] == [
        {"role": "assistant", "tool_calls": [wrapped]},
        {"role": "tool", "name": "f", "content": "3"},
    ]


def test_parts_of_text_are_joined_as_the_openai_api_joins_them():
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2+2?"}, "Say it."]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]}
    shown = formats.demonstration(row, MESSAGES)
    assert [message["content"] for message in shown.messages] == ["What is\n2+2?\nSay it.", "What is"]
    assert formats.truth(row, MESSAGES) == "What is"
    assert formats.prompt_messages(row, MESSAGES)[0]["content"] == "What is\n2+2?\nSay it."


def test_answers_of_weight_0_carry_no_loss():
    """As in OpenAI's fine-tuning data. The template does not see the key."""
    first, second = {**ANSWER, "weight": 0}, {**ANSWER, "weight": 1}
    row = {"messages": [SYSTEM, USER, first, USER, second, USER, ANSWER]}
    shown = formats.demonstration(row, EVERY_TURN)
    assert shown.learned_turns == [4, 6]
    assert shown.messages == [SYSTEM, USER, ANSWER, USER, ANSWER, USER, ANSWER]
    assert formats.demonstration(row, MESSAGES).learned_turns == [6]
    general = EVERY_TURN.with_values({"system_prompt": "s"})
    assert formats.demonstration({"messages": row["messages"][1:]}, general).learned_turns == [4, 6]
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0.0}]
    turns += [{"from": "human", "value": "r"}, {"from": "gpt", "value": "b", "weight": 1.0}]
    assert formats.demonstration({"messages": turns}, EVERY_TURN).learned_turns == [3]
    assert formats.prompt_messages({"messages": [USER, first, USER]}, MESSAGES) == [USER, ANSWER, USER]


@pytest.mark.parametrize("name", ["weight", "loss_mask", "train", "training", "trainable", "loss", "loss_scale"])
@pytest.mark.parametrize("unlearned, learned", [(0, 1), (False, True)])
@pytest.mark.parametrize("as_turns", [False, True])
def test_answers_that_carry_no_loss_are_marked_under_any_name(name, unlearned, learned, as_turns):
    messages = [{**USER, name: unlearned}, {**ANSWER, name: unlearned}, USER, {**ANSWER, name: learned}]
    if as_turns:
        messages = [{"from": m["role"], "value": m["content"], name: m.get(name)} for m in messages]
    shown = formats.demonstration({"messages": messages}, EVERY_TURN)
    assert shown.learned_turns == [3] and shown.messages == [USER, ANSWER, USER, ANSWER]


EMPTY = {**ANSWER, "content": " "}


@pytest.mark.parametrize("empty", ["", " \n", [EMPTY], EMPTY, [USER, EMPTY]])
@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_empty_preferences_are_refused(empty, key):
    row = {"messages": [USER], "chosen": "x", "rejected": "y", key: empty}
    with raising(DataError, key=key):
        formats.preference(row, MESSAGES)


def test_messages_without_text_may_have_a_reason():
    thinks, calls = {**EMPTY, "reasoning": "hm"}, {**CALL, "content": ""}
    for messages in (
        [USER, thinks],
        [USER, calls],
        [{**SYSTEM, "content": ""}, USER, calls, {**RESULT, "content": ""}, ANSWER],
    ):
        assert formats.demonstration({"messages": messages}, MESSAGES).learned_turns
    assert formats.demonstration({"messages": [USER, EMPTY, USER, ANSWER]}, MESSAGES).learned_turns == [3]
    assert formats.prompt_messages({"messages": [USER, EMPTY]}, MESSAGES) == [USER], "a place for the answer"


def test_the_input_of_an_instruction_follows_it():
    """As in Alpaca's data sets, where many rows share an instruction."""
    form = FormatConfig(prompt_key="instruction", response_key="output")
    row = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    assert formats.prompt_messages(row, form) == [{"role": "user", "content": "Add.\n\n1, 2"}]
    assert formats.demonstration(row, form).messages[0]["content"] == "Add.\n\n1, 2"
    for nothing in ({"input": ""}, {"input": None}, {"input": " "}):
        assert formats.prompt_messages({**row, **nothing}, form)[0]["content"] == "Add."
    assert formats.prompt_messages({"instruction": "Add."}, form)[0]["content"] == "Add."
    named = FormatConfig(prompt_key="q", input_key="more")
    assert formats.prompt_messages({"q": "Add.", "more": "1", "input": "2"}, named)[0]["content"] == "Add.\n\n1"
    assert formats.prompt_messages({"prompt": "Add.", "input": "2"}, FormatConfig())[0]["content"] == "Add."
    with raising(DataError, key="input"):
        formats.prompt_messages({**row, "input": 3}, form)
    with raising(DataError, key="more"):
        formats.prompt_messages({"q": "Add."}, named)


@pytest.mark.parametrize(
    "chosen, rejected",
    [
        ([USER, ANSWER, USER, ANSWER], [USER, {**ANSWER, "content": "b"}, USER, {**ANSWER, "content": "b"}]),
        ([USER, ANSWER], [{**USER, "content": "v"}, {**ANSWER, "content": "b"}]),
        ([SYSTEM, USER, ANSWER], [USER, {**ANSWER, "content": "b"}]),
        ([USER, CALL, RESULT, ANSWER], [USER, {**ANSWER, "content": "b"}]),
        ([USER, ANSWER, USER, ANSWER], [USER, {**ANSWER, "content": "b"}, USER, ANSWER]),
    ],
    ids=["earlier answer", "question", "system prompt", "number of turns", "equal last answers"],
)
def test_pairs_whose_earlier_turns_differ_are_refused(chosen, rejected):
    """The loss is on the last answers, whose log-probs express no preference under different prompts."""
    with raising(DataError, key="chosen"):
        formats.preference({"chosen": chosen, "rejected": rejected}, MESSAGES)


@pytest.mark.parametrize(
    "written, role",
    [("human", "user"), ("User", "user"), ("HUMAN", "user"), ("System", "system"), ("Tool", "tool"),
     ("observation", "tool"), ("function", "tool"), ("developer", "developer"), ("ipython", "tool"),
     ("prompter", "user")],
)  # fmt: skip
def test_roles_have_other_names(written, role):
    row = {"messages": [{"role": written, "content": "one"}, {"role": "gpt", "content": "two"}]}
    assert formats.demonstration(row, FormatConfig(prompt_type="messages")).messages == [
        {"role": role, "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        "[" * 99999,
        r'[{"role": "user", "content": "\ud83d"}]',
        [{"content": "x"}],
        [{"role": "user"}],
        [ANSWER],
        [{"from": ["gpt"]}],
        [USER, {**ANSWER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [USER, calling('{"a": ')],
        [USER, calling([1])],
        [USER, {"role": "assistant", "tool_calls": "f()"}],
        [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{**USER, "content": ""}, ANSWER],
        [USER, EMPTY, USER, ANSWER],
        [USER, {**ANSWER, "content": [{"type": "text", "text": ""}]}],
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}],
        [USER, {"role": "assistant", "content": "", "tool_calls": []}],
        [USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}],
        [USER, {**ANSWER, "weight": 1, "train": False}],
        [USER, {**ANSWER, "loss_mask": [1, 0]}],
        [USER, {**ANSWER, "weight": 0}],
        [USER, {**ANSWER, "weight": 0.5}],
        [{**USER, "weight": 1}, ANSWER],
    ],
    ids=lambda messages: str(messages)[:60],
)
def test_unusable_messages_are_refused(messages):
    """No messages, no text, no call, nothing to learn, or a weight that cannot be heeded."""
    with raising(DataError, key="messages"):
        formats.demonstration({"messages": messages}, EVERY_TURN)


@pytest.mark.parametrize(
    "row, form",
    [
        ({"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": "x"}]}, {"prompt_key": "problem"}),
        ({"prompt": [{"role": "user", "content": "<image>Find x."}], "images": ["a.png"]},
         {"prompt_type": "messages", "messages_key": "prompt"}),
        ({"messages": [{"role": "user", "content": "Who <video>?"}], "video": "a.mp4"}, {"prompt_type": "messages"}),
    ],
    ids=["geometry3k", "veRL", "LlamaFactory"],
)  # fmt: skip
def test_a_text_with_a_mark_for_an_image_is_refused(row, form):
    form = FormatConfig(**form)
    key = form.prompt_key if form.prompt_type == "plaintext" else form.messages_key
    with raising(DataError, key=key):
        formats.prompt_messages(row, form)
    if form.prompt_type == "messages":
        with raising(DataError, key=key):
            formats.demonstration({**row, key: [*row[key], ANSWER]}, form)
        pair = {"chosen": [*row[key], ANSWER], "rejected": [*row[key], {**ANSWER, "content": "b"}]}
        with raising(DataError, key="chosen"):
            formats.preference({**row, **pair}, form)
    without = {name: value for name, value in row.items() if not name.startswith(("image", "video"))}
    assert formats.prompt_messages({**without, "images": [], "video": None}, form)  # the mark alone is text


def test_earlier_turns_in_a_column_of_their_own_are_refused():
    """LlamaFactory's form of Alpaca, whose first turns would be left out."""
    form = FormatConfig(prompt_key="instruction", response_key="output")
    row = {"instruction": "third", "output": "c", "history": [["first", "a"]]}
    with raising(DataError, key="history"):
        formats.demonstration(row, form)
    assert formats.demonstration({**row, "history": []}, form).messages[0]["content"] == "third"


@pytest.mark.parametrize("write", [json.dumps, str], ids=["JSON", "Python, as pandas writes it to CSV"])
def test_messages_as_the_text_of_a_prompt_are_refused(write):
    with raising(DataError, key="prompt"):
        formats.prompt_messages({"prompt": write([USER])}, FormatConfig())
    for text in ('[{"name": "x"}] What is this?', "[1, 2]", '[{"name": "x"}]'):
        assert formats.prompt_messages({"prompt": text}, FormatConfig())[0]["content"] == text
