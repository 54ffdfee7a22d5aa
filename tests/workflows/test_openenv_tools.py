"""OpenEnv's tool environments, with openenv-core itself."""

from __future__ import annotations

import asyncio
import json

import pytest
from workflows.chatting import Turns
from workflows.openenv_server import core_serving, make_app, serving
from workflows.workflow_helpers import make_task

from trinity_core.workflows import EnvironmentFailed, run_workflow
from trinity_core.workflows.environments.openenv import calls_in, result_text, schema


def play(url, *turns, repeat_times=1):
    task = make_task(
        "env_workflow",
        raw={"question": "Play.", "seed": 3},
        repeat_times=repeat_times,
        workflow_args={"environment": "openenv_tools", "environment_args": {"url": url}, "time_limit": 20},
    )
    model = Turns(*turns)
    return asyncio.run(run_workflow(task, model)), model


def guess(*numbers):
    said = [json.dumps({"name": "guess", "arguments": {"number": number}}) for number in numbers]
    return "".join(f"<tool_call>{call}</tool_call>" for call in said)


def test_a_server_without_tools_is_named():
    with serving(make_app()) as url, pytest.raises(EnvironmentFailed, match="tools"):
        play(url, guess(3))


def test_tools_of_openenv_core_itself_are_called():
    with core_serving("openenv_guess_tools.py") as url:
        [one], model = play(url, guess(1), guess(3))
        text = model.tokenizer.decode(one.tokens).replace("</tool_call>", "").replace("<tool_call>", "")
        assert text.startswith("[1]<uPlay.><a") and "<uNo.><a" in text
        assert one.reward == 1.0 and one.metrics["invalid_actions"] == 0 and one.metrics["episode_ended"] == 1
        wrong = ["3", '{"name": "gues", "arguments": {}}', '{"name": "guess"}', '{"name": "guess", "arguments": 3}']
        [one], model = play(url, *wrong, guess(3))
        text = model.tokenizer.decode(one.tokens)
        assert one.reward == 1.0 and one.metrics["invalid_actions"] == 4
        assert "<uCall a tool." in text and "<uError: Unknown tool: 'gues'" in text
        assert "<uError: " in text and "<uThat is no action. arguments: " in text
        [one], model = play(url, guess(1, 2, 3, 4))
        assert one.reward == 1.0 and one.metrics["turns"] == 1
        rows, _ = play(url, *["3"] * 10, guess(3), repeat_times=2)  # no call by the one whose session opens first
        wrong, right = sorted(rows, key=lambda row: row.reward)
        assert (wrong.reward, wrong.metrics["invalid_actions"]) == (0.0, 10) and wrong.action_mask.any()
        assert right.reward == 1.0
        rows, _ = play(url, guess(3), guess(3), guess(3), repeat_times=3)  # of two sessions at a time
        assert [row.reward for row in rows] == [1.0, 1.0, 1.0]


def test_calls_are_read_from_text():
    one = {"type": "call_tool", "tool_name": "f", "arguments": {"a": 1}}
    call = '{"name": "f", "arguments": {"a": 1}}'
    assert calls_in(call) == [one]
    assert calls_in(f"Let me see.\n<tool_call>\n{call}\n</tool_call><tool_call>{call}</tool_call>") == [one, one]
    assert calls_in('{"name": "f", "parameters": {"a": 1}}') == [one]
    assert calls_in('{"name": "f"}') == [{**one, "arguments": {}}]
    for text in (
        "",
        "4",
        "[]",
        "null",
        '{"name": 3}',
        "[" * 5000,
        f"<tool_call>{call}</tool_call><tool_call>x</tool_call>",
    ):
        assert calls_in(text) is None


def test_a_result_is_shown_as_its_text():
    assert result_text({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == "a\nb"
    assert result_text("a") == "a"
    assert result_text({"content": [{"type": "image", "data": "é"}]}) == '{"content": [{"type": "image", "data": "é"}]}'
    assert result_text(None) == "null"


def test_a_tool_of_the_wrong_form_is_refused():
    made = schema({"name": "f", "description": None, "input_schema": {"type": "object"}})
    assert made["function"] == {"name": "f", "description": "", "parameters": {"type": "object"}}
    with pytest.raises(EnvironmentFailed, match="input_schema"):
        schema({"name": "f"})
