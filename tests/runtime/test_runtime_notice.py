"""SIGTERM as notice of the end, on real parts: the trainer saves what it has trained.

Other notices: Ctrl-C in `tests/flows/test_flows_signals.py`; a cancellation, after which the run resumes, in
`tests/flows/test_flows_whole.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from trinity_core.checkpoints.resume import latest_whole
from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking.metrics_file import read_metrics

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


def test_a_worker_that_gets_notice_saves_what_it_has_trained(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """The run ends with an error that names the notice, and leaves no process."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(endless(tmp_path, tiny_folders)))
    job, said = tmp_path / "p/n", tmp_path / "said.txt"
    command = [sys.executable, "-m", "trinity_core.runtime.run", "--config", str(tmp_path / "run.yaml")]
    with said.open("w") as output:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 240
    while not job.exists() or last_step(job) < 2:
        assert run.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    [worker] = [process for process in family if process.name().startswith("ray::Trainer")]
    worker.terminate()
    assert run.wait(timeout=60) == 1, said.read_text()[-3000:]
    assert not psutil.wait_procs(family, timeout=60)[1]
    saved = latest_whole(job)
    assert saved == last_step(job), "nothing that was trained is lost"
    assert f"The trainer got SIGTERM and has saved step {saved}." in said.read_text()
    assert "Traceback" not in said.read_text()
