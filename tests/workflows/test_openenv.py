"""Environments over HTTP, with a misbehaving server of OpenEnv's protocol and with openenv-core itself."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from environment_tasks import main
from workflows.chatting import Turns
from workflows.openenv_server import core_serving, make_app, serving
from workflows.workflow_helpers import make_task

from trinity_core.base.waits import poll
from trinity_core.workflows import EnvironmentFailed, run_workflow
from trinity_core.workflows.environments import openenv
from trinity_core.workflows.environments.openenv import OpenEnv
from trinity_core.workflows.environments.workflow import EnvArguments

NIM = Path(__file__).parents[2] / "configs/openenv/nim_server.py"


@pytest.fixture(scope="module")
def url():
    with serving(make_app()) as url:
        yield url


def play(url, *turns, repeat_times=1, **args):
    given = {"url": url, "observation_key": "text", **args}
    task = make_task(
        "env_workflow",
        raw={"question": "Play.", "seed": 3},
        repeat_times=repeat_times,
        workflow_args={"environment": "openenv", "environment_args": given, "time_limit": 20},
    )
    model = Turns(*turns)
    return asyncio.run(run_workflow(task, model)), model


def test_a_session_is_an_episode():
    with serving(app := make_app()) as url:
        [one], model = play(url, "1", "3")
        assert any(app.state.open == 0 for _ in poll(60))
    assert model.tokenizer.decode(one.tokens) == "<uPlay.\nGuess.><a1><uNo.><a3>"
    assert one.reward == 1.0 and one.metrics["turns"] == 2 and one.metrics["episode_ended"] == 1
    assert app.state.closed == 1


def test_an_action_may_be_a_json_object(url):
    turns = ["3", '{"messag": "3"}', '{"message": "3"}']
    [one], model = play(url, *turns, action_key=None, observation_key=None)
    assert one.reward == 1.0 and one.metrics["invalid_actions"] == 2
    text = model.tokenizer.decode(one.tokens)
    assert "<uSay a JSON object.\n{" in text and "<uThat is no action. message: Field required\n{" in text


@pytest.mark.parametrize(
    ("action", "message"),
    [("nonsense", "<html>"), ("praise", "very good"), ("raise", "it broke"), ("end", "session")],
)
def test_a_failure_is_an_error_never_a_reward(url, action, message):
    with pytest.raises(EnvironmentFailed, match=message):
        play(url, action)


def test_an_observation_without_its_field_is_an_error(url):
    with pytest.raises(EnvironmentFailed, match="'board'"):
        play(url, "3", observation_key="board")


def test_a_full_server_is_asked_again(monkeypatch):
    with serving(make_app(most_sessions=1)) as url:
        rows, _ = play(url, "3", "3", repeat_times=2)
        assert [row.reward for row in rows] == [1.0, 1.0]
        first, second = OpenEnv(url), OpenEnv(url)

        async def both():
            try:
                await first.reset(0)
                await second.reset(0)
            finally:
                await first.close()
                await second.close()

        monkeypatch.setattr(openenv, "START_SECONDS", 2.0)
        with pytest.raises(EnvironmentFailed, match="no room"):
            asyncio.run(both())


def test_a_session_outlives_a_long_turn():
    """A server ends sessions whose client does not answer its pings, even while the policy generates."""

    async def turn(url):
        environment = OpenEnv(url, observation_key="text")
        await environment.reset(3)
        await asyncio.sleep(4.0)
        try:
            return await environment.step("3")
        finally:
            await environment.close()

    with serving(make_app(), ws_ping_interval=0.2, ws_ping_timeout=3.0) as url:
        assert asyncio.run(turn(url)).observation == "Right."


def test_openenv_core_itself_is_played():
    with core_serving("openenv_guess.py") as url:
        rows, _ = play(url, "3", "3", "3", repeat_times=3)  # of two sessions at a time
        assert [row.reward for row in rows] == [1.0, 1.0, 1.0]
        [one], model = play(url, "1", "3")
        assert one.reward == 1.0 and model.tokenizer.decode(one.tokens) == "<uPlay.\nGuess.><a1><uNo.><a3>"
        assert play(url, "unrewarded")[0][0].is_unscored
        [one], _ = play(url, *["say"] * 10, action_key=None)
        assert (one.reward, one.metrics["invalid_actions"]) == (0.0, 10) and one.action_mask.any()
        [one], model = play(url, '{"messag": "3"}', '{"message": "3"}', action_key=None)
        assert one.reward == 1.0 and one.metrics["invalid_actions"] == 1
        with pytest.raises(EnvironmentFailed, match="it broke"):
            play(url, "raise")


def test_best_play_wins_the_recipes_game(monkeypatch, tmp_path):
    async def played(url, seed):
        game = OpenEnv(url, observation_key="text")
        said = await game.reset(seed)
        while not said.done:
            said = await game.step(f"I take {int(said.observation.split()[-1]) % 4}.")
        await game.close()
        return said.reward

    with core_serving(NIM, "--port") as url:
        assert [asyncio.run(played(url, seed)) for seed in range(20)] == [1.0] * 20
        args = json.dumps({"url": url, "observation_key": "text"})
        options = ["--args", args, "--actions", "1", "2", "3", "--moves", "6", "--examples", "30", "--train", "2"]
        shown = {}
        for skill in ("0", "1"):
            made = ["tasks", "openenv", "--out", str(tmp_path / skill), "--skill", skill, *options]
            monkeypatch.setattr(sys, "argv", made)
            main()
            rows = (tmp_path / skill / "sft.jsonl").read_text().splitlines()
            shown[skill] = [json.loads(row)["messages"] for row in rows]
        [one], model = play(url, *["9"] * 10)  # no move: turns without effect
        assert one.reward == 0.0 and one.metrics["turns"] == 10
        assert "<uTake 1, 2 or 3. Left: " in model.tokenizer.decode(one.tokens.tolist())
    assert all(takes_the_rest(conversation) for conversation in shown["1"]), "games that were won"
    assert 0 < sum(takes_the_rest(conversation) for conversation in shown["0"]) < 30
    assert [conversation[0]["content"] for conversation in shown["0"]] == [
        conversation[0]["content"] for conversation in shown["1"]
    ]


@pytest.mark.parametrize("further", [["--args", '{"ulr": "x"}', "--actions", "1"], []])
def test_the_script_that_writes_tasks_refuses_in_one_line(further, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tasks", "openenv", "--out", str(tmp_path), "--examples", "1", *further])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("error: ") and error.count("\n") == 1


def takes_the_rest(messages):
    return int(messages[-2]["content"].split()[-1]) == int(messages[-1]["content"])


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(openenv, "START_SECONDS", 0.1)
    with pytest.raises(EnvironmentFailed, match=r"ws://127\.0\.0\.1:1/ws"):
        play("http://127.0.0.1:1", "3")


def test_an_address_is_checked():
    with pytest.raises(ValueError, match="environment_args"):
        EnvArguments.model_validate({"environment": "openenv", "environment_args": "no"})
    with pytest.raises(ValueError, match="localhost"):
        OpenEnv("localhost")
