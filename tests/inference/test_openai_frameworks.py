"""Requests as agent frameworks send them by default: all are answered, and a conversation stays one sequence.

Seen of litellm 1.110, langgraph 1.2 with langchain-openai 1.7, pydantic-ai 2.68, smolagents 1.26, dspy 3.4,
openai-agents 0.24, AgentScope 1.0.19 to 1.0.21 and 2.0.11. docs/agents.md has a recipe for each.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from inference.test_openai_api_scripted import ADD, CALL, api, folder, say, speaker  # noqa: F401

CHAT, RESPONSES = "/chat/completions", "/responses"
FUNCTION = {"type": "function", **ADD["function"]}
ASKED = {"role": "user", "content": "2 + 3?"}
ASKED_IN_PARTS = {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}
SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA, "strict": True}}
FORMAT = {"format": {"type": "json_schema", "name": "Answer", "schema": SCHEMA, "strict": True}}
CALLS, SAYS, VALUE = f"I add.</think>{CALL}", "So it is.</think>It is 5.", 'So it is.</think>{"value": 5}'


def called(**more: Any) -> dict[str, Any]:
    """The call as it comes back."""
    function = {"name": "add", "arguments": '{"x": 2, "y": 3}'}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}], **more}


def call_item(arguments: str, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments, **more}


def calls_as_text() -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 2, "y": 3}}}]
    return {"role": "assistant", "content": [{"type": "text", "text": f"\nCalling tools:\n{calls}"}]}


LITELLM = called(provider_specific_fields={"reasoning": None})
AGENTSCOPE: list[dict[str, Any]] = [
    {"role": "system", "name": "system", "content": [{"type": "text", "text": "Add."}]},
    {**ASKED_IN_PARTS, "name": "user"},
    called(name="a", content=None),
    {**RESULT, "name": "add"},
    {"role": "assistant", "name": "a", "content": [{"type": "text", "text": "It is 5."}]},
    {**ASKED_IN_PARTS, "name": "user"},
]
REMINDER = {"role": "user", "content": [{"type": "text", "text": "<system-reminder>It is 12:00.</system-reminder>"}]}
AGENTSCOPE_2 = [*AGENTSCOPE[:2], REMINDER, *AGENTSCOPE[2:], REMINDER]
TOOLS: dict[str, Any] = {"tools": [ADD]}
OUTPUT_TOOL = {"type": "function", "function": {"name": "GenerateStructuredOutput", "parameters": SCHEMA}}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
FRAMEWORKS: dict[str, tuple[list[tuple[str, dict[str, Any], str]], list[int], int]] = {
    # requests (path, body, what the policy says), answers with a loss of each sequence, answers in a grammar
    "litellm": (
        [
            (CHAT, {"messages": [ASKED], **TOOLS}, CALLS),
            (CHAT, {"messages": [ASKED, LITELLM, RESULT], **TOOLS}, SAYS),
            (CHAT, {"messages": [ASKED], "response_format": AS_JSON}, VALUE),
        ], [2, 0], 1,
    ),
    "langgraph": (
        [
            (CHAT, {"messages": [ASKED], "stream": False, **TOOLS}, CALLS),
            (CHAT, {"messages": [ASKED, called(content=None), RESULT], "stream": False, **TOOLS}, SAYS),
            (
                CHAT,
                {"messages": [ASKED], "tool_choice": {"type": "function", "function": {"name": "add"}},
                 "parallel_tool_calls": False, **TOOLS},
                CALLS,
            ),
        ], [2, 0], 1,
    ),
    "pydantic-ai": (
        [
            (RESPONSES, {"input": [ASKED], "tools": [FUNCTION], "tool_choice": "auto", "stream": False}, CALLS),
            (
                RESPONSES,
                {"input": [ASKED, call_item('{"x":2,"y":3}'), OUTPUT], "tools": [FUNCTION], "tool_choice": "required"},
                CALLS,
            ),
            (RESPONSES, {"input": [ASKED], "tools": [FUNCTION], "text": FORMAT, "tool_choice": "auto"}, VALUE),
        ], [1, 0], 2,
    ),
    "smolagents": (
        [
            (CHAT, {"messages": [ASKED_IN_PARTS], "tool_choice": "required", "stop": ["Observation:"], **TOOLS}, CALLS),
            (
                CHAT,
                {"messages": [ASKED_IN_PARTS, calls_as_text(), {"role": "user", "content": "Observation:\n5"}],
                 "tool_choice": "auto", "stop": ["Observation:"], **TOOLS},
                CALLS,
            ),
        ], [1], 1,
    ),
    "dspy": (
        [
            (CHAT, {"messages": [ASKED]}, SAYS),
            (CHAT, {"messages": [{**ASKED, "content": "As JSON"}], "response_format": {"type": "json_object"}}, VALUE),
        ], [1, 0], 1,
    ),
    "openai-agents": (
        [
            (RESPONSES, {"input": [ASKED], "tools": [FUNCTION], "include": []}, CALLS),
            (
                RESPONSES,
                {"input": [ASKED, call_item('{"x": 2, "y": 3}', id="fc_1", status="completed"), OUTPUT],
                 "tools": [FUNCTION], "include": []},
                SAYS,
            ),
        ], [2], 0,
    ),
    "agentscope": (
        [
            (CHAT, {"messages": AGENTSCOPE[:2], "stream": False, **TOOLS}, CALLS),
            (CHAT, {"messages": AGENTSCOPE[:4], "stream": False, **TOOLS}, SAYS),
            (CHAT, {"messages": AGENTSCOPE, "tool_choice": "required", **TOOLS}, CALLS),
            (CHAT, {"messages": [*AGENTSCOPE, *AGENTSCOPE[2:4]], "tool_choice": "none", **TOOLS}, SAYS),
        ], [3], 1,
    ),
    "agentscope 2": (
        [
            (CHAT, {"messages": AGENTSCOPE_2[:3], **STREAMED, **TOOLS}, CALLS),
            (CHAT, {"messages": AGENTSCOPE_2[:5], **STREAMED, **TOOLS}, SAYS),
            (CHAT, {"messages": AGENTSCOPE_2, **STREAMED, "tools": [ADD, OUTPUT_TOOL]}, SAYS),
            (
                CHAT,
                {"messages": [*AGENTSCOPE_2, AGENTSCOPE[4], REMINDER], **STREAMED, "tools": [ADD, OUTPUT_TOOL],
                 "tool_choice": {"type": "function", "function": {"name": "GenerateStructuredOutput"}}},
                VALUE,
            ),
        ], [2, 1], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_requests_of_a_framework_are_answered_and_continued(api, speaker, name):  # noqa: F811
    requests, answers, guided = FRAMEWORKS[name]
    say(speaker, *(said for _, _, said in requests))
    session = api.session()
    client = api.client(session)
    for path, body, said in requests:
        given: Any
        if body.get("stream"):
            given = [chunk.model_dump() for chunk in client.chat.completions.create(model="policy", **body)]
        else:
            given = client.post(path, cast_to=dict[str, Any], body={"model": "policy", **body})
        assert ("add" if said == CALLS else "5") in json.dumps(given)
    assert [len(sequence.answers) for sequence in session.sequences()] == answers
    assert session.guided[0] == guided
