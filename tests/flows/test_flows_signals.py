"""`trinity run` on Ctrl-C, with light actors. SIGTERM: `tests/runtime/test_runtime_notice.py`, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_flows_runs import HERE, model_and_data_beside_the_run, written

from trinity_core.checkpoints.resume import latest_whole

__all__ = ["model_and_data_beside_the_run"]

pytestmark = pytest.mark.slow

PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
sys.path.insert(0, sys.argv[1])
import test_flows_runs
test_flows_runs.use_standins(fault="slow")
sys.argv = ["trinity", "run", "--config", sys.argv[2]]
from flows.cli import main
main()
"""


def test_ctrl_c_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """At a terminal it reaches the whole group of processes."""
    metrics = tmp_path / "tests/run/monitor/metrics.jsonl"
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-c", PROGRAM, str(HERE), str(written(tmp_path, "run"))]
    child = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True)
    deadline = time.monotonic() + 240
    while not metrics.exists() or "trainer" not in metrics.read_text():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(timeout=60) == 128 + signal.SIGINT
    assert latest_whole(tmp_path / "tests/run"), "it saved because it was told to stop"
    gone, alive = psutil.wait_procs(family, timeout=15)
    assert gone and not alive
