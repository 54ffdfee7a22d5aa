"""The adapters of configs/environments, each played where its library is installed (TRINITY_ENVIRONMENTS_PYTHON names
another interpreter that has it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trinity_core.cli import app

FOLDER = Path(__file__).parents[2] / "configs" / "environments"
PYTHON = os.environ.get("TRINITY_ENVIRONMENTS_PYTHON", sys.executable)
LAKE = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "kwargs": {"is_slippery": False}}
GUESS = str(Path(__file__).with_name("verifiers_guess.py"))
ONE_TURN = {"env_id": GUESS, "env_config": {"id": "single_agent"}}
TWO_TURNS = {"env_id": GUESS, "env_config": {"taskset": {"largest": 5}}}
BEST = ["down", "I go Down", "right", "right", "down", "right"]


@pytest.mark.parametrize(
    ("library", "name", "args", "row", "actions", "shown"),
    [
        ("gymnasium", "Gymnasium", LAKE, {}, BEST, "return 1 in 6 actions; the episode has ended"),
        ("gymnasium", "Gymnasium", {"env_id": "FrozenLake-v1"}, {}, ["no move"], '"invalid": true'),
        (
            "skyrl_gym",
            "SkyRLGym",
            {"env_class": "gsm8k"},
            {"reward_spec": {"ground_truth": "4"}},
            ["#### 4"],
            "return 1 in 1",
        ),
        ("textarena", "TextArena", {"env_id": "GuessTheNumber-v0-raw"}, {}, ["[5]"], "between 1 and 20"),
        ("verifiers", "Verifiers", ONE_TURN, {}, ["2"], "return 0.5 in 1 actions; the episode has ended"),
        ("verifiers", "Verifiers", TWO_TURNS, {}, ["5", "2"], "  lower\nreward 0, done false"),
        ("verifiers", "Verifiers", TWO_TURNS, {}, ["5", "2"], "return 0.5 in 2 actions; the episode has ended"),
        ("verifiers", "Verifiers", TWO_TURNS, {}, ["5", "4", "2"], "return 0 in 2 actions; the episode has ended"),
    ],
)
def test_an_adapter_plays_its_library(library, name, args, row, actions, shown):
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    if subprocess.run([PYTHON, "-c", find], check=False).returncode:
        pytest.skip(f"{library} is not installed for {PYTHON}")
    target = f"{FOLDER}/{library}_env.py:{name}"
    workflow_args = {} if sys.executable == PYTHON else {"python": PYTHON}
    options = ["--args", json.dumps(args), "--row", json.dumps(row), "--workflow-args", json.dumps(workflow_args)]
    result = CliRunner().invoke(app, ["env", "try", target, *options, "--seed", "1", "--actions", *actions])
    assert result.exit_code == 0, result.exception
    assert shown in result.output


def test_continuous_actions_are_refused():
    pytest.importorskip("gymnasium")
    target = f"{FOLDER}/gymnasium_env.py:Gymnasium"
    result = CliRunner().invoke(app, ["env", "try", target, "--args", '{"env_id": "Pendulum-v1"}', "--actions", "1"])
    assert result.exit_code == 1 and "Pendulum-v1" in str(result.exception)
