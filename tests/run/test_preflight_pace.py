"""`trinity plan --measure`: seconds a step from a short real run, kept for the next plan."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from raising import raising
from typer.testing import CliRunner

from flows.cli import app
from trinity_core.base.errors import TrinityError
from trinity_core.config import Config, config_from_dict
from trinity_core.config.paths import operator_input_file
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.metrics_file import MetricLine
from trinity_core.run.preflight import pace
from trinity_core.run.preflight.checks import oversized
from trinity_core.run.preflight.pace import (
    STEPS,
    Pace,
    cache_file,
    cached_pace,
    hindrance,
    keep,
    pace_of,
    trial_of,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tree(folders: TinyFolders, **changed: Any) -> dict[str, Any]:
    columns = {"prompt_key": "question", "response_key": "answer"}
    taskset = {"path": str(folders.data), "default_workflow_type": "math_workflow", "format": columns}
    return {
        "name": "measured",
        "checkpoint_root_dir": "runs",
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": str(folders.model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "buffer": {
            "batch_size": 4,
            "total_steps": 30,
            "explorer_input": {"taskset": taskset, "eval_tasksets": [{**taskset, "name": "test", "split": "test"}]},
            "trainer_input": {"experience_buffer": {"path": "sqlite:///mine.db"}},
        },
        "monitor": {"prometheus_port": 9123},
        **changed,
    }


def supervised(folders: TinyFolders, **changed: Any) -> dict[str, Any]:
    data = {"path": str(folders.data), "split": "sft", "format": {"prompt_key": "question", "response_key": "answer"}}
    return {
        "name": "measured",
        "mode": "train",
        "checkpoint_root_dir": "runs",
        "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": str(folders.model), "max_prompt_tokens": 88, "max_response_tokens": 40},
        "buffer": {"train_batch_size": 8, "total_steps": 400, "trainer_input": {"experience_buffer": data}},
        **changed,
    }


def lines(seconds: list[float], began: float) -> list[MetricLine]:
    """A run whose first step ends 10 s after its beginning, and each later one `seconds` after it."""
    ends = [began + 10 + sum(seconds[:count]) for count in range(len(seconds) + 1)]
    trained = [
        MetricLine(step, "trainer", end, {"timing_s/update_actor": 1.5, "timing_s/lay_out": 0.25})
        for step, end in enumerate(ends, 1)
    ]
    explored = [MetricLine(step, "explorer", end, {"timing_s/generate": step / 2}) for step, end in enumerate(ends, 1)]
    return [*explored, *trained]


def test_the_pace_leaves_out_the_first_steps() -> None:
    pace = pace_of(lines([8.0, 2.0, 4.0], began=100.0), 100.0, left_out=2, measured="today")
    assert pace == Pace(3.0, 7.0, {"generate": 1.75, "train": 1.75}, "today")
    assert pace.whole(10) == 37.0
    with pytest.raises(ValueError):
        pace_of(lines([8.0], began=100.0), 100.0, left_out=2, measured="")


def test_a_trial_touches_nothing_of_the_run(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    config = config_from_dict(tree(tiny_folders))
    trial = trial_of(config.with_values({"explorer.api_port": 9124}), tmp_path)
    assert tmp_path in trial.job_dir.parents and trial.buffer.total_steps == STEPS
    assert not trial.buffer.explorer_input.eval_tasksets and not trial.monitor.prometheus_port
    assert not trial.explorer.api_port
    beside = {"explorer.eval_beside_training": True, "monitor.stop.tokens": 9}
    beside_trial = trial_of(config.with_values(beside), tmp_path)
    assert not beside_trial.explorer.eval_beside_training and beside_trial.monitor.stop.tokens is None
    assert trial.buffer.trainer_input.experience_buffer.path is None
    saved = {"experience_pipeline": {"save_input": True, "input_save_path": str(tmp_path / "mine.jsonl")}}
    assert operator_input_file(trial_of(config_from_dict(tree(tiny_folders, data_processor=saved)), tmp_path)) is None
    sft = config_from_dict(supervised(tiny_folders))
    assert trial_of(sft, tmp_path).buffer.trainer_input == sft.buffer.trainer_input, "it reads the user's data"


def test_what_has_no_pace_of_its_own_is_said(tiny_folders: TinyFolders) -> None:
    def why(**changed: Any) -> str:
        return hindrance(config_from_dict(tree(tiny_folders, **changed)))

    assert why() == "" == hindrance(config_from_dict(supervised(tiny_folders)))
    assert all(why(mode=mode) for mode in ("explore", "train", "bench"))
    assert why(cluster={"ray_address": "10.0.0.1:6379"})
    queue = {"name": "asked", "path": "tasks.db", "storage_type": "queue"}
    buffer = {**tree(tiny_folders)["buffer"], "explorer_input": {"tasksets": [queue]}}
    assert why(buffer=buffer)


def test_a_pace_is_known_for_what_goes_as_fast(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    """Names, places and lengths of runs change nothing; batches, lengths of answers and the model's shape do."""

    def config(**values: Any) -> Config:
        return config_from_dict(tree(tiny_folders)).with_values(values)

    keep(config(), Pace(2.0, 30.0))
    other = tree(tiny_folders, name="other", project="mine", checkpoint_root_dir="elsewhere", monitor={})
    other["buffer"] = {**other["buffer"], "total_steps": 7}
    assert cached_pace(config_from_dict(other)) == Pace(2.0, 30.0)
    for key, value in {"buffer.batch_size": 8, "model.max_response_tokens": 41, "seed": 5}.items():
        assert cached_pace(config(**{key: value})) is None, key
    moved = tmp_path / "model"
    moved.mkdir()
    (moved / "config.json").write_text("{}")
    before = cache_file(config(**{"model.model_path": str(moved)}))
    (moved / "config.json").write_text('{"num_hidden_layers": 2}')
    assert cache_file(config(**{"model.model_path": str(moved)})) != before


@pytest.mark.parametrize("damaged", ["{", '{"step": "fast", "start": 1.0}'])
def test_a_damaged_pace_stops_no_run(damaged: str, tiny_folders: TinyFolders, tmp_path: Path) -> None:
    config = config_from_dict(tree(tiny_folders))
    keep(config, Pace(2.0, 30.0))
    cache_file(config).write_text(damaged)
    assert cached_pace(config) is None
    assert not [*oversized(config.with_values({"checkpoint_root_dir": str(tmp_path)}))]


def plan(file: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["plan", "--config", str(file), *options])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plan_measures_a_stage_once(
    tiny_folders: TinyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real trainer; its folder is removed, the user's is not made, and the next plan knows its pace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(supervised(tiny_folders)))
    assert "`trinity plan --measure` runs a few steps" in plan(file).stdout
    measured = plan(file, "--measure", "--json")
    assert measured.exit_code == 0, measured.output
    assert f"Measuring measured: step {STEPS} of {STEPS}" in measured.stderr
    (stage,) = json.loads(measured.stdout)["stages"]
    assert 0 < stage["pace"]["step"] < 60 and 0 < stage["pace"]["start"] < 200 and stage["pace"]["parts"]["train"] > 0
    again = plan(file, "--measure", "name=later", "buffer.total_steps=7")
    assert "was measured" in again.stderr and "Measuring" not in again.stderr
    assert f"{stage['pace']['step']:.3g} s a step (train" in again.stdout
    assert not (tmp_path / "runs").exists() and not [*(tmp_path / "temporary").glob("trinity-plan-*")]


def test_a_trial_that_takes_too_long_is_ended(
    tiny_folders: TinyFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "MOST_SECONDS", 1.0)
    config = config_from_dict(supervised(tiny_folders))
    with raising(TrinityError, key="buffer.batch_size"):
        pace.measure(config, lambda _: None)
    commands = [child.as_dict(["cmdline"])["cmdline"] or [] for child in psutil.Process().children()]
    assert not [command for command in commands if "trial.yaml" in " ".join(command)]


def test_a_trial_that_fails_says_why(tiny_folders: TinyFolders, tmp_path: Path) -> None:
    wrong = supervised(tiny_folders)
    wrong["model"] = {**wrong["model"], "model_path": str(tmp_path)}
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(wrong))
    failed = plan(file, "--measure")
    assert failed.exit_code == 1 and isinstance(failed.exception, TrinityError)
    assert "model.model_path" in str(failed.exception)
