"""SIGTERM and Ctrl-C as notice of the end, on real parts: the trainer saves, and the next run resumes from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from trinity_core.checkpoints.resume import latest_whole
from trinity_core.data.tiny import TinyFolders
from trinity_core.tracking.metrics_file import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND = [
    sys.executable, "-c", "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "runpy.run_module('trinity_core.runtime.run', run_name='__main__')",
]  # fmt: skip
"""It hears Ctrl-C also where the tests run in the background of a shell."""


def to_worker(run: int) -> None:
    """To the trainer's only worker."""
    family = psutil.Process(run).children(recursive=True)
    [worker] = [process for process in family if process.name().startswith("ray::Trainer")]
    worker.terminate()


def ctrl_c(run: int) -> None:
    """To the process that was started, and all that it has not put into groups of their own, as a terminal does."""
    os.killpg(run, signal.SIGINT)


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


def noticed(root: Path, job: Path, send: Callable[[int], None]) -> tuple[int, str]:
    """Exit code and output of a run that gets its notice after two further steps. It leaves no process."""
    begun_at = last_step(job) if job.exists() else 0
    said = root / "said.txt"
    command = [*COMMAND, "--config", str(root / "run.yaml")]
    with said.open("w") as output:
        run = subprocess.Popen(command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 240
    while not job.exists() or last_step(job) < begun_at + 2:
        assert run.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    assert run.pid not in {os.getpgid(process.pid) for process in family}, "the group is the run alone"
    send(run.pid)
    code = run.wait(timeout=60)
    assert not psutil.wait_procs(family, timeout=60)[1]
    return code, said.read_text()


def test_every_notice_saves_what_was_trained(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(endless(tmp_path, tiny_folders)))
    job = tmp_path / "p/n"
    saved = 0
    for send, code in ((to_worker, 1), (ctrl_c, 128 + signal.SIGINT)):
        ended, said = noticed(tmp_path, job, send)
        assert ended == code, said[-3000:]
        assert "Traceback" not in said
        resumed = re.search(r"Resuming from the checkpoint of step (\d+)", said)
        assert (int(resumed[1]) if resumed else 0) == saved
        saved = latest_whole(job) or 0
        assert saved == last_step(job), "nothing that was trained is lost"
        assert send is not to_worker or f"The trainer got SIGTERM and has saved step {saved}." in said
