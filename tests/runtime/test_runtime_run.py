"""The page that runs everything, `runtime/run.py`, on real parts and without Prefect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trinity_core.data.tiny import TinyFolders
from trinity_core.runtime import run
from trinity_core.tracking import read_metrics

ROOT = Path(__file__).parent.parent.parent
STEPS = 3


def write_config(root: Path, tiny: TinyFolders, **sections: Any) -> Path:
    columns = {"prompt_key": "question", "response_key": "answer"}
    data = {"path": str(tiny.data), "format": columns}
    config = {
        "project": "p",
        "name": "n",
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 4,
            "total_steps": STEPS,
            "explorer_input": {"taskset": data, "eval_tasksets": [{"name": "test", "split": "test", **data}]},
        },
        "explorer": {"eval_interval": 0, "rollout_model": {"enforce_eager": True, "kv_cache_gib": 1}},
        "synchronizer": {"sync_method": "memory"},
        "monitor": {"monitor_type": "tensorboard"},
    }
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(config | sections))
    return path


def run_page(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m trinity_core.runtime.run` in an interpreter that has no Prefect."""
    program = (
        "import runpy, sys; sys.modules['prefect'] = None; sys.argv[0] = 'run';"
        "runpy.run_module('trinity_core.runtime.run', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_the_page_is_at_most_100_lines() -> None:
    assert len(Path(run.__file__).read_text().splitlines()) <= 100


def test_a_wrong_setting_ends_the_run_with_one_line(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    done = run_page("--config", str(write_config(tmp_path, tiny_folders)), "bufer.batch_size=3")
    assert done.returncode == 1
    assert "bufer" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_pipeline_runs_without_prefect(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """A stage from a data set, then one from its model that explores a step ahead of the trainer."""
    worked = {
        "path": str(tiny_folders.data),
        "split": "sft",
        "format": {"prompt_key": "question", "response_key": "answer"},
    }
    buffer = {"train_batch_size": 8, "total_steps": 2, "trainer_input": {"experience_buffer": worked}}
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    rft = {"stage_name": "rft", "synchronizer": {"sync_method": "memory", "sync_offset": 1}}
    path = write_config(tmp_path, tiny_folders, stages=[sft, rft])
    done = run_page("--config", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "p/n_sft: step 2" in done.stdout and f"p/n_rft: step {STEPS}" in done.stdout
    job = tmp_path / "p/n_rft"
    summary = json.loads((job / "summary.json").read_text())
    assert summary["step"] == STEPS and 0 <= summary["score"] <= 1 and Path(summary["hf_dir"]).is_dir()
    assert summary["results"]["train"]["ended"] == "finished" and summary["results"]["explore"]["step"] == STEPS
    assert json.loads((job / "trainer_meta.json").read_text())["model"].startswith(str(tmp_path / "p/n_sft"))
    lines = read_metrics(job)
    versions = [line.metrics["version"] for line in lines if line.source == "explorer"]
    assert versions == [0, 0, 1], "no step waited for the train step on the rows of the step before"
    stale = [line.metrics["staleness/max"] for line in lines if line.source == "trainer"]
    assert stale == [0, 1, 1], "and the trainer had those rows when it wanted them"


@pytest.mark.slow
def test_a_failed_asynchronous_run_leaves_no_process(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """Every task of the second explore step fails: one line says so, and the exit code is 1."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/breaking.py").write_text(
        "from trinity_core.workflows import WORKFLOWS\n"
        "from trinity_core.workflows.builtin import MathWorkflow\n\n\n"
        "@WORKFLOWS.register('breaking')\n"
        "class Breaking(MathWorkflow):\n"
        "    async def run(self):\n"
        "        if self.task.index >= 4:\n"
        "            raise RuntimeError('the tool is gone')\n"
        "        return await super().run()\n"
    )
    path = write_config(tmp_path, tiny_folders)
    done = run_page(
        "--config", str(path), f"plugin_dir={tmp_path / 'plugins'}", "explorer.max_retry_times=0",
        "explorer.eval_on_startup=false",
        "buffer.default_workflow_type=breaking", "synchronizer.sync_style=dynamic_by_explorer",
    )  # fmt: skip
    assert done.returncode == 1
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "tasks of explore step" in error and "the tool is gone" in error
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "p/n/summary.json").exists()
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert not left.stdout.split()
