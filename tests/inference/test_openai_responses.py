"""The Responses API: conversion of requests and answers, and what its clients see."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inference.test_openai_api_scripted import ADD, CALL, api, folder, say, speaker  # noqa: F401
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from trinity_core.rollout.openai_api.responses import chat_request, event_stream, response_of
from trinity_core.rollout.openai_api.session_auth import Refusal

FUNCTION = {"type": "function", **ADD["function"]}


def test_a_text_and_its_instructions_are_messages():
    chat = chat_request(
        {"model": "policy", "input": "2 + 3?", "instructions": "Add.", "max_output_tokens": 7, "top_p": 1}
    )
    assert chat == {
        "model": "policy",
        "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3?"}],
        "max_completion_tokens": 7,
        "top_p": 1,
    }


def test_the_items_of_an_answer_are_one_message_again():
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Add."}]},
        {"role": "user", "content": "2 + 3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "id": "fc_2", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "5"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "5"}]},
        {"role": "assistant", "content": "5"},
    ]
    messages = chat_request({"model": "policy", "input": items})["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert messages[0]["content"] == "Add." and [one["content"] for one in messages[3:]] == ["5", "5", "5"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]
    assert (messages[2]["content"], messages[2]["reasoning"]) == ("I add.", "Hm.")


def test_formats_and_tools_are_nested():
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chosen = {"type": "function", "name": "add"}
    body = {"model": "m", "input": "?", "text": {"format": schema}, "tools": [FUNCTION], "tool_choice": chosen}
    chat = chat_request(body)
    assert chat["response_format"]["json_schema"] == {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat["tools"] == [ADD] and chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    "more, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": 3}, "input"),
        ({"tools": ["a"]}, "tools"),
        ({"tools": 3}, "tools"),
        ({"text": "a"}, "text"),
        ({"text": {"format": "a"}}, "text"),
        ({"tools": [FUNCTION], "tool_choice": ["x"]}, "tool_choice"),
        *(
            ({"input": [{"type": kind, "role": role, name: content}]}, "input")
            for kind, role, name in (
                ("message", "user", "content"),
                ("message", "assistant", "content"),
                ("reasoning", None, "content"),
                ("function_call_output", None, "output"),
            )
            for content in (["a"], [["a"]])
        ),
    ],
)
def test_what_needs_a_store_or_a_service_is_refused(more, param):
    with pytest.raises(Refusal) as refusal:
        chat_request({"model": "m", "input": "?", **more})
    assert refusal.value.status == 400 and refusal.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "format", "output"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KINDS = st.sampled_from(["message", "reasoning", "function_call", "function_call_output"])
ITEMS = st.fixed_dictionaries({"type": KINDS}, optional={"role": JSON, "content": JSON, "output": JSON, "name": JSON})


@given(
    st.fixed_dictionaries(
        {"input": st.lists(ITEMS | JSON, max_size=3) | JSON},
        optional=dict.fromkeys(["tools", "tool_choice", "text", "instructions"], JSON),
    )
)
def test_a_malformed_body_is_refused(body):
    try:
        assert isinstance(chat_request(body)["messages"], list)
    except Refusal as refusal:
        assert refusal.status == 400


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_responses_and_events_are_those_of_the_openai_package(finish):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": "It", "reasoning": "Hm.", "tool_calls": [call]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": None}
    completion = {"model": "m", "usage": usage, "choices": [{"message": message, "finish_reason": finish}]}
    response = response_of({"input": "?", "tools": [FUNCTION]}, completion)
    Response.model_validate(response)
    for event in event_stream(response):
        TypeAdapter(ResponseStreamEvent).validate_json(event.partition("data: ")[2])


def test_an_answer_that_was_cut_is_incomplete():
    message = {"role": "assistant", "content": "It", "reasoning": "Hm."}
    completion = {
        "model": "m",
        "choices": [{"finish_reason": "length", "message": message}],
        "usage": {"total_tokens": 9},
    }
    response = response_of({"input": "?"}, completion)
    assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    events = [json.loads(event.partition("data: ")[2]) for event in event_stream(response)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1] == {"type": "response.incomplete", "sequence_number": len(events) - 1, "response": response}


def test_clients_of_the_responses_api_are_recorded(api, speaker):  # noqa: F811
    say(speaker, f"I add.</think>{CALL}", "So it is.</think>5")
    session = api.session()
    client = api.client(session)
    messages = [{"role": "user", "content": "2 + 3?"}]
    first = client.responses.create(model="policy", input=messages, tools=[FUNCTION])
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"x": 2, "y": 3} and first.usage.output_tokens > 0
    messages += [item.model_dump() for item in first.output]
    messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    with client.responses.stream(model="policy", input=messages, tools=[FUNCTION]) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "5"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    [sequence] = session.sequences()
    assert len(sequence.answers) == 2 and sequence.mask.sum() == session.sampled_tokens


def test_errors_are_those_of_the_api(api):  # noqa: F811
    client = api.client(api.session())
    for wrong, code in (
        ({"model": "other", "input": "?"}, "model_not_found"),
        ({"model": "policy", "input": "?", "previous_response_id": "resp_1"}, "unsupported_parameter"),
        ({"model": "policy", "input": "?", "temperature": -1}, None),
        ({"model": "policy", "input": "?", "temperature": "warm"}, None),
        ({"model": "policy", "input": [{"role": "user"}, 3]}, "unsupported_value"),
    ):
        with pytest.raises(openai.APIStatusError) as error:
            client.responses.create(**wrong)
        assert error.value.status_code == (404 if code == "model_not_found" else 400) and error.value.code == code
