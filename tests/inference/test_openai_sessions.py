"""Recorded sessions: which requests continue which, and the sequences that hold each sampled token once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.base.errors import DataError
from trinity_core.data.messages import canonical
from trinity_core.data.session_log import ANSWERS, answers_in_loss
from trinity_core.data.turns import Call, continued_prompt, text_after_answer
from trinity_core.rollout.inference.requests import Sample
from trinity_core.rollout.openai_api.recorded_session import RecordedSession


def call(prompt, tokens, reason="stop", first=0, version=3):
    """A call whose log-probs number its tokens from `first`."""
    length = len(tokens)
    numbers = np.arange(first, first + length, dtype=np.float32)
    sample = Sample(np.array(tokens, np.int32), numbers, np.full(length, version, np.int32), reason)
    return Call(np.array(prompt, np.int32), sample)


@st.composite
def recorded(draw, most=9):
    """Calls of one session: each starts over, continues an earlier one, or branches off within one. Few distinct
    tokens, so that answers and contexts coincide."""
    word = st.integers(0, 1)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, most))):
        prompt = draw(st.lists(word, min_size=1, max_size=2))
        if calls and draw(st.booleans()):
            earlier = list(draw(st.sampled_from(calls)).tokens)
            cut = draw(st.integers(1, len(earlier)))
            prompt = earlier + prompt if draw(st.booleans()) else earlier[:cut]
        sampled = draw(st.lists(word, min_size=1, max_size=3))
        calls.append(call(prompt, sampled, first=sum(len(one.sample.tokens) for one in calls)))
    return calls


@given(recorded())
def test_each_sampled_token_counts_once_in_its_context(calls):
    session = RecordedSession()
    for one in calls:
        session.record("", [(one, None)])
    seen, digests = {}, []
    for sequence in session.sequences():
        for place in np.flatnonzero(sequence.mask):
            number, end = int(sequence.logprobs[place]), sequence.prompt_length + place + 1
            assert number not in seen
            seen[number] = sequence.tokens[:end].tolist()
            assert sequence.versions[place] == 3
        assert not sequence.logprobs[~sequence.mask].any()
        assert (sequence.versions[~sequence.mask] == -1).all()
        assert sequence.mask[0]
        answers, others = answers_in_loss(sequence.experience(info={ANSWERS: sequence.answers}))
        assert not others
        digests += answers
    expected = [one.tokens[: len(one.prompt) + i + 1].tolist() for one in calls for i in range(len(one.sample.tokens))]
    assert [seen[number] for number in range(len(expected))] == expected
    assert len(seen) == len(expected)
    assert sorted(digests) == sorted(one.digest for one in calls)


def test_a_shared_prefix_counts_in_one_branch_only():
    session = RecordedSession()
    session.record("", [(call([1], [2, 3]), None)])
    session.record("", [(call([1, 2, 3, 4], [5], first=2), None)])
    session.record("", [(call([1, 2, 3, 6], [7], first=3, reason="length"), None)])
    first, second = session.sequences()
    assert first.tokens.tolist() == [1, 2, 3, 4, 5] and first.mask.tolist() == [True, True, False, True]
    assert second.tokens.tolist() == [1, 2, 3, 6, 7] and second.prompt_length == 4
    assert second.truncated and not first.truncated
    assert second.experience(reward=0.5, run=2).logprobs.tolist() == [3.0]


def test_equal_answers_are_distinguished():
    """Two equal answers, each followed by its own turn, need two sequences and not three."""
    session = RecordedSession()
    for number, (prompt, sampled) in enumerate([([1], [2]), ([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6])]):
        session.record("", [(call(prompt, sampled, first=number), None)])
    assert sorted(one.tokens.tolist() for one in session.sequences()) == [[1, 2, 3, 4], [1, 2, 5, 6]]


def test_an_answer_without_tokens_is_not_kept():
    session = RecordedSession()
    session.record("", [(call([1], []), [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}])])
    assert session.sequences() == []


# ---- which messages continue an answer ----

ASK = {"role": "user", "content": "2 + 2?"}
TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 2}'}}


def test_messages_that_continue_an_answer_find_it():
    session, first, second = RecordedSession(), call([1], [2]), call([1, 2, 3], [4])
    answer, more = {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}
    session.record("tools", [(first, [ASK, answer])])
    session.record("tools", [(second, [ASK, answer, more, answer])])
    assert session.continued("tools", [ASK, answer, more]) == (first, 2)
    assert session.continued("tools", [ASK, answer, more, answer, more]) == (second, 4)
    assert session.continued("tools", [ASK, answer]) is None
    assert session.continued("other tools", [ASK, answer, more]) is None
    assert session.continued("tools", [{**ASK, "content": "2 + 3?"}, answer, more]) is None
    assert session.continued("tools", [ASK, {**answer, "content": "5"}, more]) is None
    assert session.continued("tools", [answer, more]) is None


@pytest.mark.parametrize(
    "back",
    [
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL], "refusal": None, "audio": None},
        {"role": "assistant", "tool_calls": [TOOL_CALL], "reasoning": "two and two"},
        {"role": "assistant", "content": [], "tool_calls": [TOOL_CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 2, "y": 2}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": json.dumps('{"x":2,"y":2}')}}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "add", "arguments": json.dumps({"y": 2, "x": 2}, indent=1)}}],
        },
        {"role": "assistant", "content": f"Calling tools:\n{[TOOL_CALL]}"},
        {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{[TOOL_CALL]}"}]},
    ],
)
def test_an_answer_is_known_in_all_its_spellings(back):
    assert canonical(back) == canonical({"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]})


def calling(arguments, content=""):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    "said, back, same",
    [
        ("\n 4\n", "4", True),
        ("It is\n\n  4.", "It is 4.", True),
        ('{"x": 1, "y": [2, 3]}', '{"y":[2,3],"x":1}\n', True),
        ('{"x": 1, "y": [2, 3]}', '{"y":[3,2],"x":1}', False),
        ("It is 4.", "It is4.", False),
        ("[not JSON,  at all", "[not JSON, at all", True),
        ("Calling tools:\n[not a list", "Calling tools: [not a list", True),
        ("Calling tools:\n[1]", "Calling tools:\n[]", False),
    ],
)
def test_white_space_and_key_order_of_an_answer_are_ignored(said, back, same):
    texts = [canonical({"role": "assistant", "content": content}) for content in (said, back)]
    assert (texts[0] == texts[1]) == same


@given(recorded(), st.data())
def test_guided_answers_are_context(calls, data):
    """Each other token still counts once, after the same tokens."""
    marks = data.draw(st.lists(st.sampled_from(["all", "none", "last"]), min_size=len(calls), max_size=len(calls)))
    free = {
        "all": lambda count: None,
        "none": lambda count: np.zeros(count, bool),
        "last": lambda count: np.arange(count) == count - 1,
    }
    calls = [replace(one, free=free[mark](len(one.sample.tokens))) for one, mark in zip(calls, marks, strict=True)]
    session = RecordedSession()
    for one in calls:
        session.record("", [(one, None)])
    sequences = session.sequences()
    places = {
        int(sequence.logprobs[place]): sequence.tokens[: sequence.prompt_length + place + 1].tolist()
        for sequence in sequences
        for place in np.flatnonzero(sequence.mask)
    }
    firsts = np.cumsum([0] + [len(one.sample.tokens) for one in calls])
    expected = {
        int(first) + i: one.tokens[: len(one.prompt) + i + 1].tolist()
        for first, one in zip(firsts[:-1], calls, strict=True)
        for i in range(len(one.sample.tokens))
        if one.free is None or one.free[i]
    }
    assert places == expected
    assert sum(int(sequence.mask.sum()) for sequence in sequences) == len(expected)
    for sequence in sequences:
        one = sequence.experience(info={ANSWERS: sequence.answers})
        digests, others = answers_in_loss(one)
        assert not others and len(digests) == len(sequence.answers)
        assert set(digests) <= {call.digest for call in calls}


def test_branches_with_equal_calls_are_told_apart_by_their_thoughts():
    session, result = RecordedSession(), {"role": "tool", "content": "4"}
    calls, answer = [call([1], [tag]) for tag in (2, 3, 4)], calling("{}")
    for tag, one in zip("abc", calls, strict=True):
        session.record("", [(one, [ASK, {**answer, "reasoning": tag}])])

    def continued(*messages, live=True):
        (branch, _), exchange = session.continued("", [ASK, *messages]), session.begin()
        exchange.continues = branch
        if not live:
            exchange.close()
        return branch

    def sent_back(tag):
        return {**answer, "reasoning": f"{tag}\n"}

    assert [continued(sent_back(tag), result, live=False) for tag in "bacb"] == [calls[1], calls[0], calls[2], calls[1]]
    assert continued({**answer, "reasoning": "its own summary"}, result, live=False) is calls[0]
    later = call([1, 3, 9], [5])
    session.record("", [(later, [ASK, sent_back("b"), result, {"role": "assistant", "content": "4"}])])
    assert [continued(answer, result) for _ in range(4)] == [calls[0], calls[2], calls[2], calls[2]]
    other = call([1, 2, 9], [5])
    session.record("", [(other, [ASK, sent_back("a"), result, {"role": "assistant", "content": "4"}])])
    end = {"role": "assistant", "content": "4"}, ASK
    assert continued(sent_back("b"), result, *end) is later and continued(sent_back("a"), result, *end) is other


@pytest.mark.parametrize("back", ["{}", "", None, {}, '{"x": 2,', json.dumps('{"x": 2,')])
def test_arguments_that_no_client_can_read_come_back_repaired(back):
    session, first = RecordedSession(), call([1], [2])
    session.record("tools", [(first, [ASK, calling('{"x": 2,')])])
    assert session.continued("tools", [ASK, calling(back), {"role": "tool", "content": "?"}]) == (first, 2)
    assert session.continued("tools", [ASK, calling('{"x": 3}'), {"role": "tool", "content": "?"}]) is None
    session.record("tools", [(first, [ASK, calling("")])])
    assert session.continued("tools", [ASK, calling("{}"), {"role": "tool", "content": "?"}]) == (first, 2)


MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        f"[{MANY_DIGITS}]",
        "Calling tools: [{'function': 'x'}]",
        "Calling tools: [{[]: 1}]",
        "Calling tools: [{'function': {'name': 'f', 'arguments': {(1, 2): 3}}}]",
        "Calling tools: [{'function': {'name': 'f', 'arguments': {'a': {1: 2, 'b': 3}}}}]",
        "Calling tools: [{'function': {'name': 'f', 'arguments': {'a': 0x" + "f" * 5000 + "}}}]",
    ],
)
def test_text_that_is_no_call_is_compared_as_text(text):
    answer, other = ({"role": "assistant", "content": content} for content in (text, text + " b"))
    assert canonical(answer) == canonical({**answer, "content": f" {text} "}) != canonical(other)


def test_a_request_whose_answer_cannot_be_journalled_leaves_nothing():
    """Journal and record always agree."""
    journal, session = [], RecordedSession()
    session.keeps = lambda setting, kept: journal.append((setting, kept))
    exchange = session.begin()
    exchange.messages, exchange.calls = [ASK], {("a", 0): call([1], [2])}
    with pytest.raises(AttributeError):
        exchange.keep({0: ["no message"]})
    assert journal == [] and session.sampled_tokens == 0
    exchange.close()
    assert session.dropped_tokens == 1


def test_what_begins_a_new_sequence_is_known():
    session, answer, more = (
        RecordedSession(),
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
    )
    assert session.departure("", [ASK]) is None
    session.record("", [(call([1], [2]), [ASK, answer])])
    assert session.departure("", [ASK, answer, more]) is None
    session.record("", [(call([1, 2, 3], [4]), [ASK, answer, more, answer])])
    assert session.departure("", [ASK, answer, more, answer, more]) is None
    reasons = [
        session.departure("", messages)
        for messages in (
            [ASK, {**answer, "content": "four"}, more],
            [ASK, {**answer, "tool_calls": [TOOL_CALL]}, more],
            [ASK, answer, {**more, "content": "no?"}],
            [more, answer, ASK],
            [ASK, answer, more],
        )
    ]
    assert [reason and reason.partition(" (")[0] for reason in reasons[:4]] == [
        "message 2 of 3", "message 2 of 3", "message 3 of 3", "message 1 of 3",
    ]  # fmt: skip
    assert all(reasons) and session.departure("other tools", [ASK, answer, more]) not in (None, *reasons)


def test_messages_that_differ_are_told_apart():
    other = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}
    texts = [
        canonical(message)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
            {"role": "assistant", "content": "", "tool_calls": [other]},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": ""},
            {"role": "user", "content": "\n"},
            {"role": "user", "content": "", "name": "eve"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        )
    ]
    assert len(set(texts)) == len(texts)
    parts = [{"type": "text", "text": "2 +"}, {"type": "text", "text": " 2?"}]
    assert canonical({"role": "user", "content": parts}) == canonical(ASK)


# ---- what a template writes after an answer ----


def chatml(messages, generation):
    """ChatML that writes tool calls like Qwen, drops the thoughts of all answers but the last, and trims."""
    parts = []
    for message in messages:
        content = str(message.get("content") or "").split("</think>")[-1].strip()
        calls = "".join(f"\n<tool>{call['function']['name']}</tool>" for call in message.get("tool_calls") or ())
        parts.append(f"<s>{message['role']}\n{content}{calls}<e>\n")
    return "".join(parts) + ("<s>assistant\n" if generation else "")


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "<think>hm</think> 4"},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL, TOOL_CALL]},
    ],
)
def test_only_the_text_after_the_answer_is_new(answer):
    new = [{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}]
    text = text_after_answer(chatml, [ASK, answer, *new], 2)
    assert text == "<e>\n<s>tool\n4<e>\n<s>user\nso?<e>\n<s>assistant\n"


def one_call_a_turn(messages, generation):
    if any(len(message.get("tool_calls") or ()) > 1 for message in messages):
        raise DataError("one call a turn")
    return chatml(messages, generation)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_template_that_refuses_two_calls_goes_on_after_them(calls):
    double = {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL, TOOL_CALL]}
    answer = {"role": "assistant", "content": "so", "tool_calls": [TOOL_CALL] * calls}
    result = {"role": "tool", "content": "4"}
    text = text_after_answer(one_call_a_turn, [ASK, double, result, result, answer, ASK], 5)
    assert text == "<e>\n<s>user\n2 + 2?<e>\n<s>assistant\n"
    with pytest.raises(DataError):  # what follows is not recorded and must be rendered as it is
        text_after_answer(one_call_a_turn, [ASK, answer, result, double], 2)


def test_a_template_that_hides_the_answer_is_noticed():
    assert text_after_answer(lambda *_: "always the same", [ASK, {"role": "assistant", "content": "4"}, ASK], 2) is None


def test_the_end_of_a_turn_is_not_repeated():
    assert continued_prompt(call([1], [2, 9]), [9, 3]).tolist() == [1, 2, 9, 3]
    assert continued_prompt(call([1], [2, 8]), [9, 3]).tolist() == [1, 2, 8, 9, 3]  # ended by another token
    assert continued_prompt(call([1], [2, 9], "length"), [9, 3]).tolist() == [1, 2, 9, 9, 3]  # 9 was cut, not an end
