"""`trinity run` on SIGTERM and SIGINT, and when its Prefect server is killed, with light actors.

A notice to one process alone: `test_training_worker.py`, `test_run_attempt.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from standins import STEPS
from test_flows_runs import HERE, model_and_data_beside_the_run, written

from trinity_core.exchange.checkpoints.resume import latest_whole
from trinity_core.exchange.tracking.metrics_file import read_metrics

__all__ = ["model_and_data_beside_the_run"]

pytestmark = pytest.mark.slow

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a shell
sys.path.insert(0, sys.argv[1])
import test_flows_runs
test_flows_runs.use_standins(fault="slow")
sys.argv = ["trinity", "run", "--config", sys.argv[2]]
from flows.cli import main
main()
"""


def working(folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """`trinity run` of a slow run that has made a step."""
    metrics = folder / "tests/run/monitor/metrics.jsonl"
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-c", PROGRAM, str(HERE), str(written(folder, "run"))]
    child = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **options)
    deadline = time.monotonic() + 240
    while not metrics.exists() or "trainer" not in metrics.read_text():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return child


def test_a_run_without_its_server_trains_to_its_end_and_then_fails(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        child = working(tmp_path, stderr=output)
    try:
        [server] = [process for process in psutil.Process(child.pid).children() if "uvicorn" in process.cmdline()]
        server.kill()
        assert child.wait(timeout=120) == 1, "it does not try for minutes to report"
    finally:
        child.kill()
    assert "error: The Prefect server of this command has ended" in printed.read_text()
    assert json.loads((tmp_path / "tests/run/summary.json").read_text())["results"]["train"]["step"] == STEPS


def last_step(folder: Path) -> int:
    return max(line.step for line in read_metrics(folder / "tests/run") if line.source == "trainer")


@pytest.mark.parametrize(("notice", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves_nothing_behind(tmp_path: Path, notice: signal.Signals, code: int) -> None:
    """The signal goes to the group of the process that was started, as in a terminal."""
    printed = tmp_path / "printed"
    with printed.open("w") as output:
        child = working(tmp_path, stderr=output)
    end_by(child, notice, code)
    assert not [word for word in ("Traceback", "Crash") if word in printed.read_text()]
    step = last_step(tmp_path)
    assert latest_whole(tmp_path / "tests/run") == step
    assert f"step {step} of run" in printed.read_text().splitlines()[-1], "what is saved is the last line"


def test_a_closed_terminal_ends_a_run_that_saves(tmp_path: Path) -> None:
    """Nobody reads its output any more, as after `| head`; a shell and the kernel send a signal each."""
    child = working(tmp_path, stderr=subprocess.PIPE)
    assert child.stderr is not None
    child.stderr.close()  # without waiting for a line, which a quiet run prints at its end alone
    end_by(child, signal.SIGHUP, 143)
    assert latest_whole(tmp_path / "tests/run") == last_step(tmp_path)


def end_by(child: subprocess.Popen[bytes], notice: signal.Signals, code: int) -> None:
    """Send a signal to the group of a run, twice if it is SIGHUP, and see the run end with all its processes."""
    family = psutil.Process(child.pid).children(recursive=True)
    assert child.pid not in {os.getpgid(process.pid) for process in family}, "the group is the run alone"
    os.killpg(child.pid, notice)
    if notice == signal.SIGHUP:
        time.sleep(0.1)
        os.killpg(child.pid, notice)
    assert child.wait(timeout=60) == code
    assert not psutil.wait_procs(family, timeout=60)[1]
