"""What a configuration will do is said before anything is loaded."""

from __future__ import annotations

import json
import re

import yaml
from outlook_configs import config_of
from safetensors import safe_open
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.config import config_from_dict
from trinity_core.runtime.outlook.model_shape import parameters_of
from trinity_core.runtime.readiness.planned import planned
from trinity_core.runtime.readiness.planned_text import planned_text


def test_parameters_are_those_in_the_weight_files(tiny_folders, tmp_path):
    count = 0
    for file in tiny_folders.model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            count += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118
    assert parameters_of(tiny_folders.model) == count > 0
    assert parameters_of(tmp_path) is None


def test_the_plan_names_what_each_stage_does(tiny_folders, tmp_path):
    taskset = {"path": str(tiny_folders.data), "default_workflow_type": "math_workflow"}
    taskset["format"] = {"prompt_key": "question", "response_key": "answer"}
    tree = {
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
        "model": {"model_path": str(tiny_folders.model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"batch_size": 4, "total_steps": 6, "explorer_input": {"taskset": taskset}},
        "trainer": {"save_interval": 3},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    told = CliRunner().invoke(app, ["plan", "--config", str(path), "--json"])
    assert told.exit_code == 0, told.output
    (stage,) = json.loads(told.stdout)["stages"]
    assert (stage["total_steps"], stage["tasks_a_step"], stage["rollouts_a_step"]) == (6, 4, 32)
    assert (stage["sampled_tokens_a_step"], stage["experiences_a_step"]) == (32 * 40, 32)
    assert (stage["save_interval"], stage["sync_interval"]) == (3, 1)

    assert (stage["evals"], stage["saves"], stage["syncs"]) == (0, 2, 6)
    assert [(each["kind"], each["number"]) for each in stage["processes"]] == [("engine", 1), ("trainer worker", 1)]
    trained = {need["what"]: need["bytes"] for need in stage["processes"][1]["memory"]}
    assert trained["policy weights"] == 4 * stage["parameters"]
    assert {need["what"] for need in stage["disk"]} == {"checkpoints", "models", "experiences"}
    assert stage["settings"]["buffer"]["train_batch_size"] == 32

    (alone,) = json.loads(CliRunner().invoke(app, ["plan", "--config", str(path), "mode=explore", "--json"]).stdout)[
        "stages"
    ]
    assert (alone["experiences_a_step"], alone["save_interval"], alone["sync_interval"]) == (None, None, None)

    lines = CliRunner().invoke(app, ["plan", "--config", str(path)]).stdout
    assert "4 tasks, 32 rollouts, at most 1,280 sampled tokens a turn" in lines
    table = lines[lines.index("  takes") :].splitlines()[1:]
    amounts, whats = zip(
        *(re.fullmatch(r"( +\d+(?:\.\d+)? [KMG]iB)  (.+)", row).groups() for row in table), strict=True
    )
    assert len({len(amount) for amount in amounts}) == 1, "amounts end in one column"
    titles = [what.split(", ")[0] for what in whats if what[0] != " "]
    assert titles == ["engine", "trainer worker", "disk"]
    assert not (tmp_path / "runs").exists(), "planning leaves nothing behind"


def test_plan_of_an_evaluation_names_endpoint_and_task_sets(tmp_path):
    endpoint = {"base_url": "http://127.0.0.1:9/v1", "model_name": "mine"}
    eval_set = {"name": "hard", "path": "nowhere.jsonl", "default_workflow_type": "math_workflow"}
    tree = {
        "mode": "bench",
        "buffer": {"explorer_input": {"eval_tasksets": [eval_set]}},
        "explorer": {"external_model": endpoint},
        "model": {"max_model_len": 64},
    }
    (stage,) = planned(config_from_dict(tree))
    first, model, evals, *_ = planned_text([stage]).splitlines()
    assert "bench" in first and "grpo" not in first and "ppo" not in first
    assert model.split() == ["model", "mine", "at", "http://127.0.0.1:9/v1"]
    assert evals.split(maxsplit=1) == ["eval", "1 in all, on hard"]


def test_plan_says_why_an_estimate_is_missing(tmp_path):
    told = planned_text(planned(config_of()))
    assert told.count(": no-model is not in the cache of the hub") == 3, "engine, trainer and disk"


def test_a_configuration_that_is_not_fine_has_no_plan(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mode: nothing\n")
    told = CliRunner().invoke(app, ["plan", "--config", str(path)])
    assert told.exit_code == 2
    assert "mode" in told.stderr
