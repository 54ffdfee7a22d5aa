"""Ending processes, whatever they do meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trinity_core.base.processes import LEAST_FILES, end, families, start_mark, still_running, still_runs, stop

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


FREEING = """
import ctypes, psutil
from trinity_core.base.processes import freeing_at_once

MEGABYTES = 1 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


def left(count=32):
    before, blocks = psutil.Process().memory_info().rss, []
    for _ in range(count):
        blocks.append(libc.malloc(8 * MEGABYTES))
        ctypes.memset(blocks[-1], 1, 8 * MEGABYTES)
        libc.malloc(64)  # lies behind the block and stays
    for block in blocks:
        libc.free(block)
    return (psutil.Process().memory_info().rss - before) // MEGABYTES


with freeing_at_once():
    print(left())
print(left())
"""


def test_memory_freed_while_models_are_loaded_is_returned() -> None:
    """Elsewhere a trainer on the CPU keeps it for the next step."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
    done = subprocess.run([sys.executable, "-c", FREEING], env=environment, capture_output=True, text=True, check=True)
    within, after = map(int, done.stdout.split())
    assert within < 16 and after > 200


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


NOTICES_NOTHING = """
import subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_one_that_its_parent_has_not_noticed_has_ended() -> None:
    """As below the first process of a container, which may look for ended ones now and then, or never."""
    with subprocess.Popen([sys.executable, "-c", NOTICES_NOTHING], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        assert still_running([process], 0) == [process]
        process.terminate()
        assert end([process], grace=5) == [] and process.status() == psutil.STATUS_ZOMBIE
        parent.kill()


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


LIMITED = """
import os, resource, runpy, sys
from trinity_core.base import processes
limit, value, *sys.argv = sys.argv[1:]
value = int(value)
resource.setrlimit(getattr(resource, limit), (value, value))
if limit == "RLIMIT_NPROC":  # which root may exceed
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    processes.require_limits()
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


ENTRANCES = ("flows.cli up", "trinity_core.run")
AS_ANOTHER = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize(
    ("limit", "value", "named", "entrance"),
    [
        *(("RLIMIT_NOFILE", 64, "ulimit -n", entrance) for entrance in ENTRANCES),
        ("RLIMIT_FSIZE", 2 << 20, "ulimit -f", "train"),
        pytest.param("RLIMIT_NPROC", 60, "ulimit -u", "train", marks=AS_ANOTHER),
    ],
)
def test_a_low_limit_is_named_before_anything_starts(
    limit: str, value: int, named: str, entrance: str, tmp_path: Path
) -> None:
    (tmp_path / "prefect.yaml").touch()
    (tmp_path / "call.py").write_text(
        "from trinity_core import train\ntrain('model', [{'prompt': 'a'}], [len], output_dir='out')\n"
    )
    module, *rest = ("call" if entrance == "train" else entrance).split()
    rest += [] if entrance in ("train", "flows.cli up") else ["--config", "run.yaml"]
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, limit, str(value), module, *rest],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{Path(__file__).parent.parent}:{tmp_path}"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0 and named in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / ".trinity").exists() and not (tmp_path / "checkpoints").exists()
    assert time.monotonic() - begun < 60


def test_a_soft_limit_of_open_files_is_raised() -> None:
    script = (
        "import resource as r; from trinity_core.base.processes import *; r.setrlimit(r.RLIMIT_NOFILE, (64, 4096)); "
        "require_limits(); print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == LEAST_FILES
