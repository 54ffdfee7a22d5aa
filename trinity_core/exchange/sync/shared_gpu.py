"""One GPU for explorer and trainer, used in turns (`cluster.colocate`).

Deadlocks are excluded by a rule: a side releases the GPU before it waits for the other one, and waits for nothing but
files while it holds the GPU. The explorer waits if its version is not published, the trainer if there is no batch, so
schedule and store decide whose turn it is. The lock only keeps a side from using the GPU before the other has released
it. The system releases the lock of a process that dies; engines of a dead explorer end with the run.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trinity_core.base.errors import TransientFault
from trinity_core.base.files import clear_errors
from trinity_core.base.waits import Wait, poll

LOOK_SECONDS = 0.25


class SharedGpu:
    """One side's hold on the GPU. Not thread-safe: only one thread at a time may acquire and release."""

    def __init__(self, path: Path, side: str) -> None:
        """`path` is the lock file, the same for both sides; `side` is this side's name in messages."""
        self._path, self._side = path, side
        self._lock: IO[str] | None = None
        self._wait: Wait | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None

    @property
    def text(self) -> str:
        return self._wait.text if self._wait else ""

    def acquire(
        self, timeout: float, is_over: Callable[[], bool], tell: Callable[[str], None] = lambda text: None
    ) -> bool:
        """Block until this side holds the GPU. Return False once `is_over()`: it is no longer needed.

        `tell` is called now and then with a description of the wait, and with "" at the end. Raises TransientFault,
        naming the holder, `timeout` seconds (`synchronizer.sync_timeout`) after the holder's last progress.
        """
        if self.held:
            return True
        self._wait, look = Wait("the GPU that explorer and trainer share"), 0.0
        progress, since = 0, 0.0
        with clear_errors("locking", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.open("a+")
            try:
                for elapsed in poll():
                    if _try(lock):
                        self._lock = lock
                        self._sign()
                        return True
                    if elapsed >= look:
                        look = elapsed + LOOK_SECONDS
                        if is_over():
                            return False
                        tell(self._wait.note(f"{_holder(lock)} has it"))
                    if (touched := os.fstat(lock.fileno()).st_mtime_ns) != progress:
                        progress, since = touched, elapsed
                    elif elapsed - since > timeout:
                        break
                raise TransientFault(
                    f"the {self._side} waited {timeout:g} s (synchronizer.sync_timeout) for the GPU, which "
                    f"{_holder(lock)} has not given up"
                )
            finally:
                self._wait = None
                tell("")
                if self._lock is not lock:
                    lock.close()

    def release(self) -> None:
        """Release the GPU to the other side; no effect if this side does not hold it."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may also have the file open
            self._lock.close()
            self._lock = None

    def tell_progress(self) -> None:
        """Restart the other side's time limit after a step, if this side holds the GPU."""
        if self._lock is not None:
            self._sign()

    def _sign(self) -> None:
        assert self._lock is not None
        self._lock.truncate(0)
        self._lock.write(f"the {self._side} (process {os.getpid()}, since {time.strftime('%H:%M:%S')})")
        self._lock.flush()


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read() or "the other side"


def _try(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
