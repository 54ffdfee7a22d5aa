"""The lock by which explorer and trainer use one GPU one at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trinity_core.base.errors import TransientFault
from trinity_core.exchange.sync.shared_gpu import SharedGpu

HOLD = """
import sys, time
from pathlib import Path
from trinity_core.exchange.sync.shared_gpu import SharedGpu
gpu = SharedGpu(Path(sys.argv[1]), "trainer")
gpu.acquire(5, lambda: False)
print("held", flush=True)
time.sleep(60)
"""


def never() -> bool:
    return False


def test_one_side_at_a_time(tmp_path: Path) -> None:
    explorer, trainer = (SharedGpu(tmp_path / "run" / "gpu.lock", side) for side in ("explorer", "trainer"))
    assert explorer.acquire(1, never) and explorer.held and explorer.acquire(0, never)
    asked: list[str] = []

    def is_over() -> bool:
        asked.append(trainer.text)
        return len(asked) == 3

    assert not trainer.acquire(10, is_over) and not trainer.held, "there was no need for it any more"
    assert "explorer" in asked[-1] and not trainer.text
    with pytest.raises(TransientFault, match=str(os.getpid())):  # names who has it
        trainer.acquire(0.1, never)
    waiting = threading.Thread(target=trainer.acquire, args=(10, never))
    waiting.start()
    explorer.release()
    waiting.join(10)
    assert trainer.held and not explorer.held
    trainer.release()
    trainer.release()
    assert explorer.acquire(0, never)


def test_a_turn_of_many_steps_is_waited_for_while_steps_are_done(tmp_path: Path) -> None:
    holder, other = SharedGpu(tmp_path / "lock", "explorer"), SharedGpu(tmp_path / "lock", "trainer")
    holder.tell_progress()
    holder.acquire(0, never)
    took: list[float] = []

    def waits() -> None:
        began = time.monotonic()
        with pytest.raises(TransientFault):
            other.acquire(1.5, never)
        took.append(time.monotonic() - began)

    waiting = threading.Thread(target=waits)
    waiting.start()
    for _ in range(8):
        time.sleep(0.3)
        holder.tell_progress()
    waiting.join(20)
    assert took and took[0] > 3.0


def test_a_killed_holder_gives_it_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        mine = SharedGpu(tmp_path / "lock", "explorer")
        with pytest.raises(TransientFault, match=f"process {holder.pid}"):
            mine.acquire(0.1, never)
        holder.send_signal(signal.SIGKILL)
        assert mine.acquire(10, never)


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    mine, other = SharedGpu(tmp_path / "lock", "explorer"), SharedGpu(tmp_path / "lock", "trainer")
    mine.acquire(0, never)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        mine.release()
        assert other.acquire(1, never)
        child.kill()
