"""Workers answer within a limit, and no child outlives its parent, whatever it has started."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.base.children import CallFailed, Child, NoAnswer, Worker

SERVED = '''
import ctypes, os, subprocess, sys, time
from trinity_core.base.errors import DataError

class Served:
    """Obeys its calls."""

    def __init__(self, place, number=0):
        self.place, self.number = place, number

    def sum(self, *numbers):
        print("not for the parent")
        return sum(numbers, self.number)

    async def data(self, count):
        return bytes(count)

    def daemon(self):
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def raises(self, what):
        raise {"user": DataError("row 3"), "own": KeyError("x")}[what]

    def sleep(self):
        time.sleep(600)

    def fork_and_sleep(self):
        if ctypes.CDLL(None).fork():
            time.sleep(600)
        time.sleep(30)

    def spin(self, seconds):
        while time.process_time() < seconds:
            pass

    def exit(self):
        sys.exit(3)

    def close_connection(self):
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        time.sleep(600)

    def die(self):
        os._exit(3)

    def close(self):
        open(f"{self.place}/closed", "w").close()
'''


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("served") / "served.py"
    file.write_text(SERVED)
    return f"{file}:Served"


@pytest.fixture(scope="module")
def worker(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(target, most_bytes=1000)
    worker.make({"place": str(tmp_path_factory.mktemp("place"))}, {"number": 5, "unknown": 6})
    yield worker
    worker.kill()


def gone(pid: int) -> bool:
    """True once a process has ended, at the latest after 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_calls_return_json_or_bytes(worker: Worker) -> None:
    assert worker.call("sum", 1, 2, seconds=10) == 8, "the optional argument that the class takes counts"
    assert worker.call("data", 1 << 20) == bytes(1 << 20)


def test_an_exception_leaves_the_worker_alive(worker: Worker) -> None:
    with pytest.raises(CallFailed) as of_users:
        worker.call("raises", "user")
    assert str(of_users.value) == "row 3" and of_users.value.is_for_users
    with pytest.raises(CallFailed) as own:
        worker.call("raises", "own")
    assert not own.value.is_for_users and own.value.missing is None
    with pytest.raises(CallFailed):
        worker.call("exit")
    with pytest.raises(CallFailed) as absent:
        worker.call("nothing")
    assert absent.value.kinds[0] == "NoSuchMethod"
    assert worker.call("sum") == 5


def test_it_is_closed_when_it_is_made_with_other_arguments(target: str, tmp_path: Path) -> None:
    worker = Worker(target)
    for _ in range(2):
        worker.make({"place": str(tmp_path)})
        assert not (tmp_path / "closed").exists()
    worker.make({"place": str(tmp_path), "number": 1})
    assert (tmp_path / "closed").exists()
    worker.kill()


@pytest.mark.parametrize(("method", "died"), [("sleep", False), ("die", True), ("data", False)])
def test_a_worker_without_an_answer_is_killed_with_its_daemons(target: str, method: str, died: bool) -> None:
    worker = Worker(target, most_bytes=100)
    worker.make({"place": "/nowhere"})
    daemon = worker.call("daemon")
    with pytest.raises(NoAnswer) as failure:
        worker.call("sum", 10**200) if method == "data" else worker.call(method, seconds=0.2)
    assert failure.value.died is died and not worker.alive
    assert gone(daemon)


def test_a_worker_that_closes_its_connection_and_goes_on_is_killed(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_core.base.children.END_SECONDS", 2.0)
    worker = Worker(target)
    worker.make({"place": "/nowhere"})
    with pytest.raises(NoAnswer) as failure:
        worker.call("close_connection", seconds=60)
    assert failure.value.died and not worker.alive and "signal" not in str(failure.value), "that was our own"


def test_the_end_of_a_worker_is_noticed_though_its_child_holds_the_connection(target: str) -> None:
    worker = Worker(target)
    worker.make({"place": "/nowhere"})
    threading.Timer(0.3, os.kill, (worker.process.pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(NoAnswer) as failure:
        worker.call("fork_and_sleep", seconds=20)
    assert failure.value.died and time.monotonic() - began < 10


def cpu_seconds(worker: Worker) -> float:
    return sum(psutil.Process(worker.process.pid).cpu_times()[:2])


def test_a_worker_that_gets_no_cpu_is_not_out_of_time(target: str) -> None:
    """A wait for the CPU that is not over yet counts too: the scheduler reports it only when it ends."""
    worker = Worker(target)
    worker.make({"place": "/nowhere"})
    used = cpu_seconds(worker)
    core = min(os.sched_getaffinity(0))
    rival = Child([sys.executable, "-c", "while True: pass"])
    for pid in (worker.process.pid, rival.process.pid):
        os.sched_setaffinity(pid, {core})
    os.sched_setscheduler(worker.process.pid, os.SCHED_IDLE, os.sched_param(0))
    if (group := Path(f"/proc/{worker.process.pid}/autogroup")).exists():  # each session has a share of its own
        group.write_text("19")
    try:
        worker.call("spin", used + 0.04, seconds=0.5)  # what it waits for but a CPU, such as a page, is its own time
    finally:
        rival.kill()
        worker.kill()


def test_a_wait_for_a_cpu_that_is_over_is_not_counted(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the worker had waited all the time, and was never seen to."""
    monkeypatch.setattr("trinity_core.base.children.waits_for_cpu", lambda pid: False)
    monkeypatch.setattr("trinity_core.base.children.run_queue_seconds", lambda pid: time.monotonic())
    worker = Worker(target)
    worker.make({"place": "/nowhere"})
    used = cpu_seconds(worker)
    worker.call("spin", used + 0.5, seconds=0.2)
    worker.kill()


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import not_installed_here\n")
    worker = Worker(f"{tmp_path}/needs.py:Needs")
    with pytest.raises(CallFailed) as failure:
        worker.make({})
    assert failure.value.missing == "not_installed_here"
    worker.kill()


def test_the_output_of_a_command_is_kept() -> None:
    child = Child([sys.executable, "-c", "print('x' * 500, 'the end')"], keep_output=True)
    assert child.process.wait(30) == 0
    assert child.output(8) == "the end" and child.output_bytes() == 509


def test_the_output_of_a_worker_does_not_grow_with_its_calls(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "class Chatty:\n    def say(self, text):\n        print(text * 2**19, flush=True)\n"
    )
    worker = Worker(f"{tmp_path}/chatty.py:Chatty", keep_output=True)
    worker.make({})
    for text in "abcdef":
        worker.call("say", text, seconds=60)
        assert worker.output(4) == text * 3 and worker.output_bytes() < 2 << 20
    worker.kill()


@given(st.lists(st.sampled_from(["S3CR", "S3CRET", "\n", "ä", "x", " "]), max_size=12), st.integers(1, 30))
def test_no_part_of_a_secret_is_shown(pieces: list[str], shown: int) -> None:
    """Wherever the output is cut; an empty secret hides nothing."""
    child = Child.__new__(Child)
    child._output = io.BytesIO("".join(pieces).encode())
    text = child.output(shown, ["S3CR", "S3CRET", ""])
    assert not set("S3CRET") & set(text)
    assert set(text) <= set("*\näx \ufffd") and ("*" in text or not {"S3CR", "S3CRET"} & set(pieces[-1:]))


PARENT = """
import subprocess, sys, threading
from trinity_core.base.children import Child, Worker
worker = Worker(sys.argv[1])
worker.make({"place": sys.argv[2]})
print(worker.process.pid, worker.call("daemon"), flush=True)
child = Child(["sleep", "600"])
print(child.process.pid, flush=True)
worker.call("sleep" if sys.argv[3] == "busy" else "sum")
threading.Event().wait()
"""


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_children_die_with_a_parent_that_is_killed(target: str, tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-c", PARENT, target, str(tmp_path), state]
    parent = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(map(gone, pids))
    assert state == "busy" or (tmp_path / "closed").exists(), "an idle one has the time to close its files"
