"""Environments over HTTP: servers written with openenv-core, with actions and with tools over MCP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from environment_tasks import main
from ports import free_port
from raising import raising
from workflows.chatting import Turns
from workflows.workflow_helpers import make_task

from trinity_core.base.errors import InputError
from trinity_core.workflows import EnvironmentFailed, run_workflow
from trinity_core.workflows.environments import openenv
from trinity_core.workflows.environments.openenv import OpenEnv, calls_in, result_text, schema
from trinity_core.workflows.environments.workflow import EnvArguments

NIM = Path(__file__).parents[2] / "configs/openenv/nim_server.py"


@contextlib.contextmanager
def serving(script: str | Path, *before: str) -> Iterator[str]:
    """The address of a server in a file of this folder, started with these arguments and a port."""
    server = subprocess.Popen([sys.executable, Path(__file__).parent / script, *before, str(port := free_port())])
    try:
        while not is_open(port):
            assert server.poll() is None, "it does not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def is_open(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def url():
    """Guess the number 3, for two sessions at a time."""
    with serving("openenv_guess.py") as url:
        yield url


@pytest.fixture(scope="module")
def tools_url():
    """The same by a tool."""
    with serving("openenv_guess_tools.py") as url:
        yield url


def play(url, *turns, repeat_times=1, **args):
    arguments = {"url": url, "observation_key": "text", **args}
    return played("openenv", arguments, turns, repeat_times)


def call(url, *turns, repeat_times=1):
    return played("openenv_tools", {"url": url}, turns, repeat_times)


def played(environment, given, turns, repeat_times):
    task = make_task(
        "env_workflow",
        raw={"question": "Play.", "seed": 3},
        repeat_times=repeat_times,
        workflow_args={"environment": environment, "environment_args": given, "time_limit": 20},
    )
    model = Turns(*turns)
    return asyncio.run(run_workflow(task, model)), model


def test_a_session_is_an_episode(url):
    [one], model = play(url, "1", "3")
    assert model.tokenizer.decode(one.tokens) == "<uPlay.\nGuess.><a1><uNo.><a3>"
    assert one.reward == 1.0 and one.metrics["turns"] == 2 and one.metrics["episode_ended"] == 1
    assert play(url, "unrewarded")[0][0].is_unscored
    [one], model = play(url, *["say"] * 10, action_key=None)
    assert (one.reward, one.metrics["invalid_actions"]) == (0.0, 10) and one.action_mask.any()
    [one], model = play(url, '{"messag": "3"}', '{"message": "3"}', action_key=None, observation_key=None)
    assert one.reward == 1.0 and one.metrics["invalid_actions"] == 1


def test_a_failure_is_an_error_never_a_reward(url):
    with pytest.raises(EnvironmentFailed):
        play(url, "raise")
    with pytest.raises(EnvironmentFailed):
        play(url, "3", observation_key="board")
    with pytest.raises(EnvironmentFailed, match="tools"):
        call(url, guess(3))


def test_a_full_server_is_asked_again(url, monkeypatch):
    rows, _ = play(url, "3", "3", "3", repeat_times=3)
    assert [row.reward for row in rows] == [1.0, 1.0, 1.0]

    async def third():
        games = [OpenEnv(url) for _ in range(3)]
        try:
            for game in games:
                await game.reset(0)
        finally:
            for game in games:
                await game.close()

    monkeypatch.setattr(openenv, "START_SECONDS", 2.0)
    with pytest.raises(EnvironmentFailed):
        asyncio.run(third())


def test_a_session_outlives_a_long_turn(url):
    """A server ends sessions whose client does not answer its pings, here within 1 s, even while the policy thinks."""

    async def turn():
        environment = OpenEnv(url, observation_key="text")
        await environment.reset(3)
        await asyncio.sleep(4.0)
        try:
            return await environment.step("3")
        finally:
            await environment.close()

    assert asyncio.run(turn()).observation == "Right."


def test_best_play_wins_the_recipes_game(monkeypatch, tmp_path):
    async def won(url, seed):
        game = OpenEnv(url, observation_key="text")
        said = await game.reset(seed)
        while not said.done:
            said = await game.step(f"I take {int(said.observation.split()[-1]) % 4}.")
        await game.close()
        return said.reward

    with serving(NIM, "--port") as url:
        assert [asyncio.run(won(url, seed)) for seed in range(20)] == [1.0] * 20
        args = json.dumps({"url": url, "observation_key": "text"})
        options = ["--args", args, "--actions", "1", "2", "3", "--moves", "6", "--examples", "30", "--train", "2"]
        shown = {}
        for skill in ("0", "1"):
            made = ["tasks", "openenv", "--out", str(tmp_path / skill), "--skill", skill, *options]
            monkeypatch.setattr(sys, "argv", made)
            main()
            rows = (tmp_path / skill / "sft.jsonl").read_text().splitlines()
            shown[skill] = [json.loads(row)["messages"] for row in rows]
        [one], _ = play(url, *["9"] * 10)  # no move: turns without effect
        assert one.reward == 0.0 and one.metrics["turns"] == 10
    assert all(takes_the_rest(conversation) for conversation in shown["1"]), "games that were won"
    assert 0 < sum(takes_the_rest(conversation) for conversation in shown["0"]) < 30
    assert [conversation[0] for conversation in shown["0"]] == [conversation[0] for conversation in shown["1"]]


def takes_the_rest(messages):
    return int(messages[-2]["content"].split()[-1]) == int(messages[-1]["content"])


@pytest.mark.parametrize("further", [["--args", '{"ulr": "x"}', "--actions", "1"], []])
def test_the_script_that_writes_tasks_refuses_in_one_line(further, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tasks", "openenv", "--out", str(tmp_path), "--examples", "1", *further])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1


def test_an_address_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(openenv, "START_SECONDS", 0.1)
    with pytest.raises(EnvironmentFailed, match=r"ws://127\.0\.0\.1:1/ws"):
        play("http://127.0.0.1:1", "3")
    with pytest.raises(ValueError):
        OpenEnv("localhost")
    with pytest.raises(ValueError):
        EnvArguments.model_validate({"environment": "openenv", "environment_args": "no"})


# ---- tools ----


def guess(*numbers):
    said = [json.dumps({"name": "guess", "arguments": {"number": number}}) for number in numbers]
    return "".join(f"<tool_call>{call}</tool_call>" for call in said)


def test_tools_are_called(tools_url):
    [one], model = call(tools_url, guess(1), guess(3))
    text = model.tokenizer.decode(one.tokens)
    assert text.startswith("[1]<uPlay.><a") and "<uNo.><a" in text
    assert one.reward == 1.0 and one.metrics["invalid_actions"] == 0 and one.metrics["episode_ended"] == 1
    [one], model = call(tools_url, guess(1, 2, 3, 4))
    assert one.reward == 1.0 and one.metrics["turns"] == 1


def test_what_is_no_call_is_told_to_the_model(tools_url):
    wrong = ["3", '{"name": "gues", "arguments": {}}', '{"name": "guess"}', '{"name": "guess", "arguments": 3}']
    [one], model = call(tools_url, *wrong, guess(3))
    assert one.reward == 1.0 and one.metrics["invalid_actions"] == 4
    assert "Unknown tool: 'gues'" in model.tokenizer.decode(one.tokens)
    rows, _ = call(tools_url, *["3"] * 10, guess(3), repeat_times=2)  # no call by the one whose session opens first
    wrong, right = sorted(rows, key=lambda row: row.reward)
    assert (wrong.reward, wrong.metrics["invalid_actions"]) == (0.0, 10) and wrong.action_mask.any()
    assert right.reward == 1.0


def test_calls_are_read_from_text():
    one = {"type": "call_tool", "tool_name": "f", "arguments": {"a": 1}}
    text = '{"name": "f", "arguments": {"a": 1}}'
    assert calls_in(text) == [one]
    assert calls_in(f"Let me see.\n<tool_call>\n{text}\n</tool_call><tool_call>{text}</tool_call>") == [one, one]
    assert calls_in('{"name": "f", "parameters": {"a": 1}}') == [one]
    assert calls_in('{"name": "f"}') == [{**one, "arguments": {}}]
    for other in ("", "4", "[]", '{"name": 3}', "[" * 5000, f"<tool_call>{text}</tool_call><tool_call>x</tool_call>"):
        assert calls_in(other) is None


def test_results_and_tools_are_shown_as_the_model_reads_them():
    assert result_text({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == "a\nb"
    assert result_text({"content": [{"type": "image", "data": "é"}]}) == '{"content": [{"type": "image", "data": "é"}]}'
    made = schema({"name": "f", "description": None, "input_schema": {"type": "object"}})
    assert made["function"] == {"name": "f", "description": "", "parameters": {"type": "object"}}
    with pytest.raises(EnvironmentFailed):
        schema({"name": "f"})


def test_an_address_is_checked():
    with raising(InputError, key="url"):
        OpenEnv("localhost")
