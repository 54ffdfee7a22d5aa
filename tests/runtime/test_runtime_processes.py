"""Ending processes, whatever they do meanwhile."""

from __future__ import annotations

import subprocess
import sys

import psutil

from trinity_core.runtime.processes import end, families, stop

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def test_one_that_has_gone_by_itself_is_no_fault() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    child.wait()
    assert end([process], grace=1) == []


def test_one_that_does_not_listen_is_killed_and_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    process = psutil.Process(child.pid)
    assert process in families([process.name()]) and process not in families(["another name"])
    name = process.name()
    assert stop(process, grace=0.2) == [f"{name} ({child.pid})"]
    assert child.wait(timeout=5) == -9
    child.stdout.close()
