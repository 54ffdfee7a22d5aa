"""Scores of checkpoints while their run trains (`explorer.eval_beside_training`), and the base of adapters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from preflight_configs import config_of
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import write_json
from trinity_core.base.layout import JobLayout
from trinity_core.config import config_from_dict
from trinity_core.config.findings import ConfigError
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.checkpoints.beginning import STATE, Beginning
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.checkpoints.huggingface import huggingface_folder
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.evaluation_beside import stage_beside
from trinity_core.run.stage import for_evaluation

STEPS = 6


def settings(root: Path, tiny: TinyFolders, is_beside: bool, **sections: Any) -> dict[str, Any]:
    columns = {"format": {"prompt_key": "question", "response_key": "answer"}}
    taskset = {"name": "train", "path": str(tiny.data), "split": "train", "reward_fn_args": {"pattern": "e"}, **columns}
    held_out = {**taskset, "name": "test", "split": "test", "rollout_args": {"temperature": 1.0}}
    values: dict[str, Any] = {
        "project": "p", "name": "beside" if is_beside else "between", "checkpoint_root_dir": str(root), "seed": 3,
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2, "optimizer": {"lr": 1e-3}},
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 2, "total_steps": STEPS,
            "explorer_input": {
                "taskset": taskset, "eval_tasksets": [held_out], "default_reward_fn_type": "format_reward",
            },
        },
        "explorer": {
            "eval_interval": 2, "eval_beside_training": is_beside,
            "rollout_model": {"enforce_eager": True, "kv_cache_gib": 1},
        },
        "synchronizer": {"sync_method": "memory"},
        "trainer": {"save_interval": 2, "max_checkpoints_to_keep": 1},
        "monitor": {"monitor_type": "tensorboard"},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] |= section
    return values


def supervised(tiny: TinyFolders) -> dict[str, Any]:
    """Sections of a run from given answers."""
    data = {
        "name": "sft", "path": str(tiny.data), "split": "sft",
        "format": {"prompt_key": "question", "response_key": "answer"},
    }  # fmt: skip
    return {
        "algorithm": {"algorithm_type": "sft", "repeat_times": 1},
        "buffer": {"trainer_input": {"experience_buffer": data}},
    }


def begin(root: Path, values: dict[str, Any]) -> subprocess.Popen[str]:
    file = root / f"{values['name']}.yaml"
    file.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "trinity_core.run", "--config", str(file)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(root: Path, values: dict[str, Any]) -> str:
    with begin(root, values) as process:
        said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said[-3000:]
    return said


def evaluations(root: Path, name: str) -> list[MetricLine]:
    return [line for line in read_metrics(root / "p" / name) if line.source == "eval"]


def numbers(line: MetricLine) -> dict[str, float]:
    return {name: value for name, value in line.metrics.items() if name != "eval/seconds"}


@pytest.mark.campaign
@pytest.mark.timeout(1300)
def test_scores_beside_training_are_those_between_steps(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Each under its own step, also of checkpoints older than the one that is kept; the steps are the same too."""
    for is_beside in (False, True):
        run(tmp_path, settings(tmp_path, tiny_folders, is_beside))
    between, beside = (evaluations(tmp_path, name) for name in ("between", "beside"))
    assert sorted(line.step for line in beside) == [0, 2, 4, 6]
    assert {line.step: numbers(line) for line in beside} == {line.step: numbers(line) for line in between}
    norms = [
        [line.metrics["actor/grad_norm"] for line in read_metrics(tmp_path / "p" / name) if line.source == "trainer"]
        for name in ("between", "beside")
    ]
    assert norms[0] == norms[1] and len(norms[0]) == STEPS and max(norms[0]) > 0
    summary = json.loads((tmp_path / "p/beside/summary.json").read_text())
    assert summary["score"] is not None and set(summary["results"]) == {"explore", "train"}


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_an_evaluation_that_is_killed_is_repeated_once(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """In a run from given answers, which has no engines of its own; it alone writes to W&B, which admits one writer."""
    monitor = {"monitor_type": "wandb", "monitor_args": {"mode": "offline"}}
    values = settings(tmp_path, tiny_folders, True, **supervised(tiny_folders)) | {"mode": "train", "monitor": monitor}
    with begin(tmp_path, values) as process:
        wait_for_evaluation(process).kill()
        said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said[-3000:]
    assert Counter(line.step for line in evaluations(tmp_path, "beside")) == {0: 1, 2: 1, 4: 1, 6: 1}
    job_dir = tmp_path / "p/beside"
    [tracked] = (job_dir / "monitor/wandb").glob("offline-run-*/*.wandb")
    assert b"eval/" in tracked.read_bytes(), "scores of a run that has no explorer"


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_scores_what_is_missing(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Also the model that it began with, although it resumes from a checkpoint."""
    values = settings(tmp_path, tiny_folders, True, **supervised(tiny_folders)) | {"mode": "train"}
    with begin(tmp_path, values) as process:
        wait_for_evaluation(process).suspend()
        wait_until(lambda: bool(whole_steps(tmp_path / "p/beside")), process)
        process.kill()
    run(tmp_path, values)
    assert Counter(line.step for line in evaluations(tmp_path, "beside")) == {0: 1, 2: 1, 4: 1, 6: 1}


def wait_until(holds: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 800
    while not holds():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_evaluation(run: subprocess.Popen[str]) -> psutil.Process:
    """Return the process that drives the evaluation, once it is at low priority."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for process in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended
                if "ray::Explorer" in " ".join(process.cmdline()) and process.nice() >= 10:
                    return process
        time.sleep(0.1)
    raise AssertionError("no evaluation has begun")


def refused(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config_from_dict(values)
    return [problem.key for problem in error.value.problems]


def test_an_interval_between_checkpoints_is_refused(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    values = settings(tmp_path, tiny_folders, True, trainer={"save_interval": 4})
    assert refused(values) == ["explorer.eval_beside_training"]


def test_checkpoints_are_scored_beside_an_external_model(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Which `trinity evaluate` scores, under a name of its own."""
    endpoint = {"base_url": "http://127.0.0.1:1/v1", "model_name": "other", "api_key_env": "NOT_SET"}
    config = config_from_dict(settings(tmp_path, tiny_folders, True, explorer={"external_model": endpoint}))
    assert stage_beside(config).config.job_dir == config.job_dir


def test_the_evaluation_has_a_gpu_of_its_own(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    values = settings(tmp_path, tiny_folders, True, cluster={"gpu_per_node": 3})
    placed = place(config_from_dict(values), Machine(8, 3))
    assert (placed.engines, placed.trainers, placed.gpus) == (1, 1, 3)
    assert refused(settings(tmp_path, tiny_folders, True, cluster={"gpu_per_node": 2})) == [
        "explorer.rollout_model.engine_num"
    ]


def test_adapter_is_evaluated_with_the_base_of_its_run(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """In a pipeline that is the model of the stage before, not model.model_path."""
    config = config_of(f"checkpoint_root_dir={tmp_path}", "model.model_path=another", "model.lora_configs=[{rank: 4}]")
    folder = config.job_dir / "global_step_1"
    folder.mkdir(parents=True)
    write_json(folder / STATE, {"began": asdict(Beginning.of(str(tiny_folders.model)))})
    write_manifest(folder, 1)
    assert for_evaluation(config).model.model_path == str(tiny_folders.model)
    with raising(TrinityError, key="model.model_path"):
        huggingface_folder(config, 1, merge=False)


def test_adapter_of_a_moved_pipeline_is_evaluated_with_its_base(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """Where the stage before is now, if that is the same model."""
    config = config_of(f"checkpoint_root_dir={tmp_path}", "model.model_path=another", "model.lora_configs=[{rank: 4}]")
    base = JobLayout(config.job_dir.parent / "sft").huggingface(3)
    before = str(tmp_path / "before" / base.relative_to(tmp_path))
    shutil.copytree(tiny_folders.model, base)
    folder = config.job_dir / "global_step_1"
    folder.mkdir(parents=True)
    for digest, found in ((Beginning.of(str(base)).digest, str(base)), ("of another model", before)):
        write_json(folder / STATE, {"began": asdict(Beginning(before, digest))})
        write_manifest(folder, 1)
        assert for_evaluation(config).model.model_path == found
