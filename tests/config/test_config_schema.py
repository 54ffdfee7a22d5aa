"""The JSON Schema for editors: shipped, complete, and of one mind with the loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from trinity_core.cli import app
from trinity_core.config import ConfigError, config_from_dict, source
from trinity_core.config.fields import sections, settings
from trinity_core.config.json_schema import json_schema

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "configs/schema.json"
RECIPES = sorted((ROOT / "configs").rglob("*.yaml"))
GOOD: dict[str, Any] = source.read(Path(__file__).parent / "documents/quick_start.yaml").tree
VALIDATOR = Draft202012Validator(json_schema())


def changed(override: str) -> dict[str, Any]:
    origin = source.from_values(GOOD)
    source.override(origin, [override])
    return origin.tree


def test_shipped_schema_is_current() -> None:
    # In a process of its own: plugins that other tests have loaded would be in the schema of this one.
    command = [sys.executable, "-m", "trinity_core.cli", "schema", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert SHIPPED.read_text() == done.stdout, "run: make generated"
    Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_schema_accepts_every_recipe(recipe: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(source.read(recipe).tree)] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_the_schema_in_their_first_line(recipe: Path) -> None:
    head, _, name = recipe.read_text().partition("\n")[0].partition("$schema=")
    assert head == "# yaml-language-server: " and (recipe.parent / name).resolve() == SHIPPED


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.repeat_time=8",
        "algorithm.repeat_times=0",
        "algorithm.repeat_times=2.5",
        "algorithm.optimizer.lr=fast",
        "algorithm.optimizer.lr=true",
        "algorithm.optimizer.betas=[0.9]",
        "algorithm.optimizer=3",
        "explorer.auxiliary_models=judge",
        "explorer.eval_on_startup=2",
        "stages=[{stage_name: a, modell: {}}]",
        "stages=[{stage_name: a, algorithm: {repeat_time: 2}}]",
    ],
)
def test_schema_and_loader_refuse_the_same_mistakes(override: str) -> None:
    assert not VALIDATOR.is_valid(changed(override))
    with pytest.raises(ConfigError):
        config_from_dict(GOOD, [override])


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.repeat_times=${oc.env:NOWHERE,8}",
        "explorer.eval_on_startup=${oc.env:NOWHERE,true}",
        "synchronizer=${other.section}",
        "explorer.auxiliary_models=null",
        "synchronizer=null",
        "synchronizer.sync_method=null",
        "name=1.10",
        "explorer.env_vars={A: 010, B: yes}",
        "trainer.trainer_config.critic.strategy=[anything]",
        "stages=[{stage_name: 2024, mode: train, buffer: {batch_size: 4, explorer_input: {eval_tasksets: []}}}]",
    ],
)
def test_schema_accepts_what_the_loader_accepts(override: str) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(changed(override))] == []


def test_schema_says_of_a_setting_what_the_page_says() -> None:
    defined = json_schema()["$defs"]
    optimizer = defined["OptimizerConfig"]["properties"]
    assert optimizer["lr"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0}
    assert (optimizer["lr"]["default"], optimizer["lr"]["description"]) == (1e-6, "Peak learning rate.")
    assert optimizer["lr_warmup_steps"]["unit"] == "steps"
    algorithm = defined["AlgorithmConfig"]["properties"]
    assert "grpo" in algorithm["algorithm_type"]["examples"] and "dpo" in algorithm["policy_loss_fn"]["examples"]
    ratio = defined["OverRolloutConfig"]["properties"]["ratio"]["anyOf"][0]
    assert ratio == {"type": "number", "minimum": 0, "exclusiveMaximum": 1}


def test_command_lists_every_setting() -> None:
    listed = CliRunner().invoke(app, ["schema"])
    assert listed.exit_code == 0
    for key, section in sections():
        for setting in settings(section):
            if setting.section is None:
                assert f"{key}.{setting.name}: ".removeprefix(".") in listed.output
    one = CliRunner().invoke(app, ["schema", "buffer.batch_size"]).output
    head, doc, *_ = one.splitlines()
    assert head == "buffer.batch_size: whole number of tasks, at least 1 [derived]"
    assert doc.startswith("    Tasks per explore step")
    assert CliRunner().invoke(app, ["schema", "bufer"]).exit_code != 0
