"""SIGTERM to a real trainer as notice of the end: it saves, and the next run goes on from there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from trinity_core.config import load_config
from trinity_core.data.tiny import TinyFolders
from trinity_core.runlock import release
from trinity_core.runtime.placement import Machine, place
from trinity_core.runtime.stage import Stage, resume
from trinity_core.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def endless(root: Path, tiny: TinyFolders) -> dict[str, Any]:
    """A warm-up that would take hours and saves nothing on its own."""
    columns = {"prompt_key": "question", "response_key": "answer"}
    answers = {"path": str(tiny.data), "split": "sft", "format": columns}
    return {
        "project": "p",
        "name": "n",
        "mode": "train",
        "checkpoint_root_dir": str(root),
        "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": str(tiny.model), "max_prompt_tokens": 88, "max_response_tokens": 12},
        "cluster": {"gpu_per_node": 0},
        "buffer": {"train_batch_size": 8, "total_steps": 100_000, "trainer_input": {"experience_buffer": answers}},
        "trainer": {"save_interval": 100_000},
        "monitor": {"monitor_type": "tensorboard"},
    }


def last_step(job: Path) -> int:
    return max((line.step for line in read_metrics(job) if line.source == "trainer"), default=0)


def test_a_worker_that_gets_sigterm_saves_what_was_trained(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    path, printed, job = tmp_path / "run.yaml", tmp_path / "printed", tmp_path / "p/n"
    path.write_text(yaml.safe_dump(endless(tmp_path, tiny_folders)))
    command = [sys.executable, "-m", "trinity_core.runtime.run", "--config", str(path)]
    with printed.open("w") as output:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 240
    while not job.exists() or last_step(job) < 2:
        assert run.poll() is None and time.monotonic() < deadline, printed.read_text()[-3000:]
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    [worker] = [each for each in family if each.name().startswith("ray::Trainer")]
    worker.terminate()
    assert run.wait(timeout=60) == 1, printed.read_text()[-3000:]
    assert not psutil.wait_procs(family, timeout=15)[1]
    saved, said = last_step(job), printed.read_text()
    assert f"The trainer got SIGTERM and has saved step {saved}." in said and "Traceback" not in said
    config = load_config(path)
    stage = resume(Stage(config, place(config, Machine(1, 0)), "sft"))
    release(config.job_dir, "training")
    assert stage.resumed_step == saved
