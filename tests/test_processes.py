"""Ending processes, whatever they do meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from trinity_core.processes import end, families, start_mark, still_runs, stop

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


def test_a_process_is_known_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record holds its start by the wall clock too, which every set of the clock moves."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started, mark = psutil.Process(child.pid).create_time(), start_mark(child.pid)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: started + 3.0)
    assert still_runs(child.pid, started, mark)
    boot, ticks = mark.split()
    assert not still_runs(child.pid, started, f"{boot} {int(ticks) - 1}"), "an earlier process with its id"
    assert not still_runs(child.pid, started, f"{boot[::-1]} {ticks}"), "before a restart of the machine"
    child.kill()
    assert child.wait() == -9 and not still_runs(child.pid, started, mark)


def test_a_record_of_an_older_release_is_known_by_its_start() -> None:
    started = psutil.Process().create_time()
    assert still_runs(os.getpid(), started) and not still_runs(os.getpid(), started - 2)
