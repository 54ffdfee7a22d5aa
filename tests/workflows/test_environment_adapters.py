"""The adapters of configs/environments, each with its real library in a separate environment (`make campaign`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_core.cli import app
from trinity_core.workflows.environments.process import ProcessEnvironment, Where
from trinity_core.workflows.environments.protocol import EnvironmentFailed

FOLDER = Path(__file__).parents[2] / "configs" / "environments"
GAMES = Path(f"{sys.prefix}-games/bin/python")
NAMES = {"gymnasium": "Gymnasium", "skyrl_gym": "SkyRLGym", "textarena": "TextArena", "verifiers": "Verifiers"}
LAKE = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "kwargs": {"is_slippery": False}}
BEST = ["down", "I go Down", "right", "right", "down", "right"]
GUESS = str(Path(__file__).with_name("verifiers_guess.py"))
SECONDS = 300.0
"""Time limit of a reset, which may start tool servers on a busy machine."""


class Players:
    """A process for each library, which imports it once."""

    def __init__(self) -> None:
        self._processes: dict[str, ProcessEnvironment] = {}

    def episode(self, library, args, actions, row=()):
        """The steps of an episode, and the tools of its environment."""
        if library not in self._processes or not self._processes[library].alive:  # a failure ends its process
            python = sys.executable if library == "gymnasium" else str(GAMES)
            where = Where(library, f"{FOLDER}/{library}_env.py:{NAMES[library]}", python)
            self._processes[library] = ProcessEnvironment(where, SECONDS)
        environment = self._processes[library]
        environment.make(args, dict(row))
        steps = [environment.reset(1)]
        tools = environment.tools()
        return [*steps, *map(environment.step, actions)], tools

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@pytest.fixture(scope="module")
def players():
    if not GAMES.exists():
        pytest.skip(f"{GAMES.parents[1]} is missing; make campaign makes it")
    players = Players()
    yield players
    players.close()


def test_gymnasium(players):
    steps, _ = players.episode("gymnasium", LAKE, BEST)
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 0, 1] and steps[-1].done
    steps, _ = players.episode("gymnasium", {"env_id": "FrozenLake-v1"}, ["no move"])
    assert steps[-1].info == {"invalid": True} and not steps[-1].done
    with pytest.raises(EnvironmentFailed, match="Pendulum-v1"):
        players.episode("gymnasium", {"env_id": "Pendulum-v1"}, [])


@pytest.mark.parametrize(("answer", "reward"), [("#### 4", 1), ("#### 5", 0)])
def test_skyrl_gym(players, answer, reward):
    row = {"reward_spec": {"ground_truth": "4"}, "answer": "4"}
    steps, _ = players.episode("skyrl_gym", {"env_class": "gsm8k"}, [answer], row)
    assert (steps[-1].reward, steps[-1].done) == (reward, True)


SEARCH = {"search_url": "http://127.0.0.1:9/retrieve", "topk": 3, "timeout": 1, "log_requests": False}


@pytest.mark.parametrize(
    ("args", "row", "answer"),
    [
        ({"env_class": "search", "env_config": SEARCH}, {"reward_spec": {"ground_truth": {"target": ["4"]}}}, "4"),
        ({"env_class": "aime"}, {"reward_model": {"ground_truth": "4"}}, "Answer: 4"),
    ],
)
def test_skyrl_gym_gets_its_settings_and_columns(players, args, row, answer):
    steps, _ = players.episode(
        "skyrl_gym", args, [f"<answer>{answer}</answer>" if "env_config" in args else answer], row
    )
    assert (steps[-1].reward, steps[-1].done) == (1, True)


def test_textarena(players):
    steps, _ = players.episode("textarena", {"env_id": "GuessTheNumber-v0-raw"}, ["[20]", "[5]"])
    assert "between 1 and 20" in steps[0].observation
    assert "lower" in steps[1].observation and "[20]" not in steps[1].observation
    assert [step.reward for step in steps] == [0, 0, 1] and steps[-1].done
    steps, _ = players.episode("textarena", {"env_id": "GuessTheNumber-v0-raw"}, ["20", "[20]", "[99]", "[0]"])
    assert [bool(step.info.get("invalid")) for step in steps[1:]] == [True, False, True, True] and steps[-1].done


@pytest.mark.parametrize(
    ("config", "actions", "rewards"),
    [
        ({"id": "single_agent"}, ["2"], [0, 0.5]),
        ({"taskset": {"largest": 5}}, ["5", "2"], [0, 0, 0.5]),
        ({"taskset": {"largest": 5}}, ["5", "4"], [0, 0, 0]),  # guessed_twice stops a third turn
        ({"player": {"max_turns": 1}}, ["5"], [0, 0]),
    ],
)
def test_verifiers(players, config, actions, rewards):
    steps, tools = players.episode("verifiers", {"env_id": GUESS, "env_config": config}, actions)
    assert steps[0].observation == "Be brief.\n\nGuess my number." and tools == []
    assert [step.reward for step in steps] == rewards and [step.done for step in steps].index(True) == len(actions)
    if len(actions) == 2:
        assert steps[1].observation == "lower"


def test_tools_of_verifiers_run_in_their_server(players):
    config = {"id": "single_agent", "taskset": {"with_tools": True}}
    call = '<tool_call>{"name": "oracle_is_less", "arguments": {"least": %s}}</tool_call>'
    args = {"env_id": GUESS, "env_config": config}
    steps, tools = players.episode("verifiers", args, [f"Is it? {call % 2}{call % 3}", "2"])
    assert [tool["function"]["name"] for tool in tools] == ["oracle_is_less"]
    assert steps[1].observation == "no\n\nyes" and "invalid" not in steps[1].info
    assert (steps[2].reward, steps[2].done) == (0.5, True)
    steps, _ = players.episode("verifiers", args, ["<tool_call>nonsense</tool_call>"])
    assert steps[1].info["invalid"] and not steps[1].done


def test_limits_in_tokens_are_refused_as_verifiers_actions_are_text(players):
    """Last of the tests with verifiers: a failure ends the process, and importing them takes 10 s."""
    with pytest.raises(EnvironmentFailed, match=r"player\.max_output_tokens"):
        players.episode("verifiers", {"env_id": GUESS, "env_config": {"player": {"max_output_tokens": 5}}}, [])


def test_env_try_plays_with_another_python(players):
    target, options = f"{FOLDER}/skyrl_gym_env.py:SkyRLGym", ["--args", '{"env_class": "gsm8k"}']
    options += ["--row", '{"reward_spec": {"ground_truth": "4"}}']
    options += ["--workflow-args", json.dumps({"python": str(GAMES)}), "--actions", "#### 4"]
    result = CliRunner().invoke(app, ["env", "try", target, *options])
    assert result.exit_code == 0 and "return 1 in 1" in result.output, result.exception
