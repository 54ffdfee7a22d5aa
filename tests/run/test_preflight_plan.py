"""What a run will do and write, against numbers worked out by hand."""

from __future__ import annotations

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from preflight_configs import SHAPE, config_of
from safetensors import safe_open
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.processes import cores
from trinity_core.base.program import coloured
from trinity_core.config import config_from_dict
from trinity_core.config.findings import ConfigError
from trinity_core.data.experience import Experience
from trinity_core.exchange.store.archive import Archive
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.hosting.placement import Machine
from trinity_core.run.preflight.disk import disk_of, free_disk
from trinity_core.run.preflight.memory import REWARD_BASE
from trinity_core.run.preflight.model_shape import parameters_of
from trinity_core.run.preflight.needs import total
from trinity_core.run.preflight.stage_plan import plan_text, plans_of
from trinity_core.run.preflight.steps import evaluations, kept_checkpoints, saves, stored_steps, syncs
from trinity_core.workflows.rewards.pool import usual_workers


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1 + 2 + 1),  # version 0, versions 4 and 8, and the last checkpoint
        (["explorer.eval_on_startup=false"], 2 + 1),
        (["explorer.eval_interval=0"], 1 + 1),
        (["explorer.eval_interval=9"], 1 + 1 + 1),  # step 10 explores with version 9
        (["synchronizer.sync_interval=5"], 1 + 1 + 1),  # versions 0 and 5
        (["buffer.explorer_input.eval_tasksets=[]"], 0),
    ],
)
def test_evaluations_of_ten_steps(overrides, expected):
    assert evaluations(config_of(*overrides), 10) == expected


@pytest.mark.parametrize(
    ("algorithm", "interval", "expected"),
    [("grpo", 4, 1 + 2 + 1), ("sft", 5, 1 + 2)],
)
def test_an_evaluation_beside_training_is_planned(algorithm, interval, expected):
    """Its checkpoints, and its processes next to those of the run, of supervised runs too."""
    mode = "train" if algorithm == "sft" else "both"
    data = ["buffer.trainer_input.experience_buffer={path: examples.jsonl}"] if algorithm == "sft" else []
    run = [f"algorithm.algorithm_type={algorithm}", f"mode={mode}", *data]
    beside = ["explorer.eval_beside_training=true", f"explorer.eval_interval={interval}", "trainer.save_interval=1"]
    [plain] = plans_of(config_of(*run), Machine(2, 0))
    [plan] = plans_of(config_of(*run, *beside), Machine(2, 0))
    assert (plan.evals, plan.eval_interval) == (expected, interval)
    more = {process.kind: process.number for process in plan.processes[len(plain.processes) :]}
    assert more.keys() == {"evaluation's engine", "evaluation's reward worker"} and more["evaluation's engine"] == 1


@pytest.mark.parametrize(
    ("interval", "keep", "expected"), [(4, None, (3, 3)), (5, 1, (2, 2)), (2, 2, (5, 3)), (0, 3, (1, 1))]
)
def test_saves_of_ten_steps(interval, keep, expected):
    overrides = [f"trainer.save_interval={interval}", *([f"trainer.max_checkpoints_to_keep={keep}"] if keep else [])]
    config = config_of(*overrides)
    assert (saves(config, 10), kept_checkpoints(config, 10)) == expected


def test_syncs_are_the_versions_published():
    assert syncs(config_of(), 10) == 10
    assert syncs(config_of("synchronizer.sync_interval=3"), 10) == 3


def test_disk_holds_checkpoints_model_and_experiences():
    needs = {need.what: need.bytes for need in disk_of(config_of(), 10, [SHAPE], 4)}
    assert needs["checkpoints"] == 3 * 1_000_000 * (4 + 8)
    assert needs["models"] == 4_000_000
    assert needs["experiences"] == 10 * 4 * 8 * (88 + 40) * 18
    assert needs["archive"] == 10 * 4 * 8 * (88 + 40) * 5
    half = disk_of(config_of("algorithm.algorithm_type=ppo"), 10, [SHAPE, SHAPE], 2)
    assert half[0].bytes == 3 * 2 * 1_000_000 * (2 + 8 + 4)
    assert total(half) == sum(need.bytes for need in half)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["trainer.max_checkpoints_to_keep=2", "trainer.save_interval=20"], 100 + 2 * 20 + 1),
        (["trainer.max_checkpoints_to_keep=3", "trainer.save_interval=80", "synchronizer.sync_interval=4"], 4 * 80 + 4),
        (["trainer.save_interval=20"], 1000),
        (["trainer.max_checkpoints_to_keep=2", "trainer.save_interval=0"], 1000),
        (
            ["trainer.max_checkpoints_to_keep=2", "trainer.save_interval=20", "synchronizer.sync_style=trainer_driven"],
            1000,
        ),
    ],
)
def test_rows_of_a_synchronous_run_go_with_its_checkpoints(settings, expected):
    assert stored_steps(config_of(*settings), 1000) == expected
    assert stored_steps(config_of(*settings), 10) == 10


@pytest.mark.parametrize("path", ["postgresql://host/run", "sqlite:////elsewhere/run.db"])
def test_experiences_elsewhere_take_no_disk_of_the_run(path):
    config = config_of(f"buffer.trainer_input.experience_buffer.path={path}")
    assert {need.what for need in disk_of(config, 10, [SHAPE], 4)} == {"checkpoints", "models", "archive"}


def test_a_run_that_resumes_has_the_room_that_it_fills_already(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=20_000, free=8_000))
    written = {"global_step_4/actor/model.safetensors": 100, "buffer/explorer_output.db": 1_000, "log/explorer.log": 5}
    written["buffer/experience_buffer.jsonl"] = 500
    for name, count in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(count))
    assert free_disk(tmp_path) == 8_000 + 100 + 1_000 + 500


@pytest.mark.parametrize(
    ("sentence", "characters"),
    [("So we compute the derivative of f(x) = 3x^2 - 4x.\n", 4.0), ("首先我们计算函数的导数，然后令其等于零。\n", 1.5)],
)
def test_disk_holds_what_full_answers_write(tmp_path, sentence, characters):
    """English has about 4 characters a token, Chinese 1.5."""
    config = config_of("model.max_prompt_tokens=200", "model.max_response_tokens=3896")
    text = (sentence * 400)[: int(4096 * characters)]
    cut = int(200 * characters)
    rows = [
        Experience(
            np.zeros(4096), 200, np.ones(3896), np.zeros(3896), np.zeros(3896), reward=1.0, group=f"g{group}", run=run,
            metrics={"accuracy": 1.0}, info={"prompt": text[:cut], "response": text[cut:], "truth": "4"},
        )
        for group in range(4)
        for run in range(8)
    ]  # fmt: skip
    with ExperienceStore.open(tmp_path / "store.db") as store:
        for step in (1, 2, 3):
            store.put("explorer", step, {}, rows, 0)
            store.lease(step, 32, step)
        Archive(tmp_path / "archive.jsonl").extend(3, store.batch)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    needs = {need.what: need.bytes for need in disk_of(config, 3, [SHAPE], 4)}
    assert written <= needs["experiences"] + needs["archive"] <= 1.15 * written


def test_plan_places_processes_on_the_machine():
    (stage,) = plans_of(config_of("trainer.worker_num=2"), Machine(8, 0))
    assert [(process.kind, process.number, process.gpus, process.threads) for process in stage.processes] == [
        ("engine", 1, 0, 8),
        ("trainer worker", 2, 0, 4),
        ("reward worker", 4, 0, 1),
    ]
    (stage,) = plans_of(config_of("explorer.reward_workers=7"), Machine(8, 0))
    assert (stage.processes[-1].kind, stage.processes[-1].number) == ("reward worker", 7)
    assert stage.processes[-1].bytes == 7 * REWARD_BASE.bytes
    (stage,) = plans_of(config_of("cluster.gpu_per_node=4"), Machine(8, 2))
    assert "cluster.gpu_per_node asks for 4 GPUs" in stage.unplaced
    (larger,) = plans_of(config_of("cluster.gpu_per_node=4"), Machine(8, 4))
    assert [(process.kind, process.number, process.gpus) for process in larger.processes] == [
        ("engine", 1, 1.0),
        ("trainer worker", 3, 1.0),
        ("reward worker", 4, 0),
    ]
    assert larger.unplaced == "" and stage.processes == larger.processes, "planned as if the GPUs were there"


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
    result = CliRunner().invoke(app, ["plan", "--config", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (stage,) = json.loads(result.stdout)["stages"]
    assert (stage["total_steps"], stage["tasks_a_step"], stage["rollouts_a_step"]) == (6, 4, 32)
    assert (stage["sampled_tokens_a_step"], stage["experiences_a_step"]) == (32 * 40, 32)
    assert (stage["save_interval"], stage["sync_interval"]) == (3, 1)

    assert (stage["evals"], stage["saves"], stage["syncs"]) == (0, 2, 6)
    processes = [("engine", 1), ("trainer worker", 1), ("reward worker", usual_workers(cores()))]
    assert [(one["kind"], one["number"]) for one in stage["processes"]] == processes
    trained = {need["what"]: need["bytes"] for need in stage["processes"][1]["memory"]}
    assert trained["policy weights"] == 4 * stage["parameters"]
    assert {need["what"] for need in stage["disk"]} == {"checkpoints", "models", "experiences", "archive"}
    assert stage["settings"]["buffer"]["train_batch_size"] == 32

    (alone,) = json.loads(CliRunner().invoke(app, ["plan", "--config", str(path), "mode=explore", "--json"]).stdout)[
        "stages"
    ]
    assert (alone["experiences_a_step"], alone["save_interval"], alone["sync_interval"]) == (None, None, None)

    lines = CliRunner().invoke(app, ["plan", "--config", str(path)]).stdout
    assert "4 tasks, 32 rollouts" in lines and "1,280" in lines
    table = lines[lines.index("  takes") :].splitlines()[1:]
    whats = [re.fullmatch(r" +\d+(?:\.\d+)? [KMG]iB  (.+)", row).group(1) for row in table]
    titles = [re.split("[,;]", what)[0] for what in whats if what[0] != " "]
    assert re.search(r"  disk; [\d.]+ [GT]iB are free here$", lines, re.MULTILINE)
    assert titles == ["engine", "trainer worker", "reward worker", "all processes at once", "disk"]
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
    (stage,) = plans_of(config_from_dict(tree))
    first, model, evals, *_ = plan_text([stage]).splitlines()
    assert "bench" in first and "grpo" not in first and "ppo" not in first
    assert model.split() == ["model", "mine", "at", "http://127.0.0.1:9/v1"]
    assert evals.split(maxsplit=1) == ["eval", "1 in all, on hard"]


def test_a_plan_sets_off_totals_their_parts_unknown_needs_and_missing_gpus():
    text = coloured(plan_text(plans_of(config_of("cluster.gpu_per_node=8"), Machine(2, 0))))
    codes = {row.group(2).strip(): int(row.group(1)) for row in re.finditer(r"\x1b\[(\d+)m([^\x1b]+)", text)}
    bold, dim, red, yellow = 1, 2, 31, 33
    assert codes["100 MiB"] == bold and dim in codes.values()
    assert {code for what, code in codes.items() if what.startswith("?")} == {yellow}
    assert next(code for what, code in codes.items() if what.startswith("place")) == red


def test_a_configuration_that_is_not_fine_has_no_plan(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mode: nothing\n")
    with pytest.raises(ConfigError) as refused:
        app(["plan", "--config", str(path)], standalone_mode=False)
    assert "mode" in {fault.key for fault in refused.value.problems} and refused.value.exit_code == 2


def test_a_plan_without_its_model_is_no_success(tmp_path, tiny_folder, monkeypatch):
    model = f"./{tiny_folder.name}"
    tree = {"model": {"model_path": model, "max_model_len": 64}, "buffer": {"batch_size": 4, "total_steps": 6}}
    tree["buffer"]["explorer_input"] = {"taskset": {"path": "tasks", "default_workflow_type": "math_workflow"}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    for folder, code in ((tiny_folder.parent, 0), (tmp_path, 1)):
        monkeypatch.chdir(folder)
        result = CliRunner().invoke(app, ["plan", "--config", str(path)])
        assert result.exit_code == code and "4 tasks" in result.stdout, result.output
    assert isinstance(result.exception, ConfigError)
    assert [(fault.key, fault.line) for fault in result.exception.problems] == [("model.model_path", 10)]
