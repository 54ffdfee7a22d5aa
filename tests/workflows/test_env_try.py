"""`trinity env try`: an environment played without a model."""

from __future__ import annotations

import json

import pytest
from raising import raising
from typer.testing import CliRunner

from trinity_core.base.errors import TrinityError
from trinity_core.cli import app

COUNTER = """
import os

class Counter:
    def __init__(self, start=0):
        self.count = start

    def reset(self, seed):
        self.count += seed
        return f"count {self.count}", 0.0, False, {}

    def step(self, action):
        if action == "crash":
            os.kill(os.getpid(), 11)
        if action == "raise":
            raise RuntimeError("no such thing")
        self.count += int(action)
        return f"count {self.count}", 0.5, self.count >= 10, {"state": str(self.count)}
"""


@pytest.fixture
def counter(tmp_path):
    (tmp_path / "counter.py").write_text(COUNTER)
    return f"{tmp_path}/counter.py:Counter"


def tried(target, *options, text=None):
    return CliRunner().invoke(app, ["env", "try", target, *options], input=text)


def test_an_episode_is_played_until_it_ends(counter):
    result = tried(counter, "--seed", "2", "--row", '{"start": 3, "seed": 7}', "--actions", "1", "4", "99")
    assert result.exit_code == 0, result.output
    assert [f"count {n}" in result.output for n in (5, 6, 10, 109)] == [True, True, True, False]
    assert 'reward 0.5, done true, info {"state": "10"}' in result.output and "return 1 in 2 actions" in result.output
    assert "1 further" in result.output


def test_a_task_set_of_a_configuration_is_played(counter, tmp_path):
    args = {"environment": counter, "environment_args": {"start": 4}}
    taskset = {"name": "games", "path": str(tmp_path), "default_workflow_type": "env_workflow", "workflow_args": args}
    buffer = {"batch_size": 1, "total_steps": 1, "explorer_input": {"tasksets": [taskset]}}
    (tmp_path / "run.yaml").write_text(
        json.dumps({"model": {"model_path": str(tmp_path), "max_model_len": 64}, "buffer": buffer})
    )
    options = ("--config", str(tmp_path / "run.yaml"), "--seed", "0", "--actions", "2")
    result = tried("games", *options)
    assert result.exit_code == 0 and "count 6" in result.output, result.output
    with raising(TrinityError, key="other"):
        raise tried("other", *options).exception


@pytest.mark.parametrize("where", ["file", "terminal"])
def test_actions_are_lines(counter, tmp_path, where):
    (tmp_path / "actions").write_text("1\n2\n")
    file = str(tmp_path / "actions") if where == "file" else "-"
    result = tried(counter, "--args", '{"start": 1}', "--seed", "0", "--actions-file", file, text="1\n2\n")
    assert result.exit_code == 0 and "count 4" in result.output and "return 1 in 2 actions" in result.output


@pytest.mark.parametrize(("action", "reason"), [("crash", "signal 11"), ("raise", "RuntimeError: no such thing")])
def test_a_failure_names_the_environment(counter, action, reason):
    result = tried(counter, "--seed", "0", "--actions", "1", action)
    assert result.exit_code == 1 and isinstance(result.exception, TrinityError)
    assert counter in str(result.exception) and reason in str(result.exception)
    assert "action 1: 1" in result.output


@pytest.mark.usefixtures("toy_games")
def test_a_registered_environment_plays():
    pytest.importorskip("gymnasium")
    args = json.dumps({"show_rules": False})
    result = tried("frozen_lake", "--args", args, "--actions", *["down", "down", "right", "right", "down", "right"])
    assert result.exit_code == 0 and "reward 1, done true" in result.output


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--args", "[1]"], "--args"),
        (["--row", "{"], "--row"),
        (["--workflow-args", '{"time_limit": 0}'], "workflow_args.time_limit"),
        (["--workflow-args", '{"proces": true}'], "workflow_args.proces"),
    ],
)
def test_wrong_options_are_named(counter, options, key):
    result = tried(counter, *options)
    assert result.exit_code == 1 and getattr(result.exception, "key", None) == key


def test_actions_need_their_option(counter):
    assert tried(counter, "1", "2").exit_code == 2
