"""Threads that do not hold up the end of their process."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import psutil
import pytest

from trinity_core.base.threads import DaemonThread, DaemonThreads, InterruptibleThreads
from trinity_core.base.waits import poll

WAITS_FOR_EVER = """
import threading
from trinity_core.base.threads import DaemonThreads
DaemonThreads("waits").submit(threading.Event().wait)
print("done")
"""


@pytest.mark.parametrize("kind", [DaemonThread, DaemonThreads, InterruptibleThreads])
def test_calls_have_a_copy_of_the_callers_context(kind: type[DaemonThreads]) -> None:
    variable: ContextVar[int] = ContextVar("variable")
    variable.set(1)

    def call() -> int:
        before = variable.get()
        variable.set(2)
        return before

    assert kind("named").submit(call).result(5) == 1 and variable.get() == 1


def test_one_thread_takes_all_calls_in_order_and_ends_with_its_executor() -> None:
    one = DaemonThread("takes all calls in order")
    done: list[int] = []
    calls = [one.submit(lambda i=i: done.append(i) or threading.get_ident()) for i in range(20)]
    assert len({call.result(5) for call in calls}) == 1 and done == list(range(20))
    with pytest.raises(ZeroDivisionError):
        one.submit(divmod, 7, 0).result(5)
    assert one.submit(divmod, 7, 2).result(5) == (3, 1)
    del one
    gc.collect()
    assert any("takes all calls in order" not in {t.name for t in threading.enumerate()} for _ in poll(60))


def test_waiting_daemon_thread_does_not_block_exit() -> None:
    command = [sys.executable, "-c", WAITS_FOR_EVER]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "done\n")


OTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(60)
"""
ENDS_WITH_ITS_PARENT = """
import os, subprocess, time
from trinity_core.base.threads import end_with
beside = subprocess.Popen(["sleep", "60"])
end_with(os.getppid(), [beside.pid])
print(beside.pid, flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_another_that_is_killed() -> None:
    command = [sys.executable, "-c", OTHER, ENDS_WITH_ITS_PARENT]
    parent = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    numbers = re.findall(r"\d+", parent.stdout.readline())
    both = [psutil.Process(int(number)) for number in numbers]
    assert len(both) == 2 and all(process.is_running() for process in both)
    parent.kill()
    parent.wait(10)
    assert not psutil.wait_procs(both, timeout=60)[1]
