"""Locks that say which parts of a run are going on. The system opens them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from trinity_core.errors import TrinityError

TRAINER = "trainer"
"""Held by the process that trains, which may outlive a killed flow."""
LINGER_SECONDS = 30.0
"""How long it may."""

_held: dict[Path, IO[bytes]] = {}


def hold(job_dir: Path, part: str, wait: float = 0.0) -> None:
    """Keep every other process from running `part` of the run in `job_dir`, until `release` or this process's end.

    This process may hold it already. Raises TrinityError where another one does and does not end within `wait` seconds.
    """
    path = _path(job_dir, part)
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    deadline = time.monotonic() + wait
    while not _locked(file):
        if time.monotonic() >= deadline:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "a process unknown"
            file.close()
            raise TrinityError(
                f"The run in {path.parent} is already going on ({part}: {holder}); wait for it or stop it, "
                "or give this one another name."
            )
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    file.flush()
    _held[path] = file


def release(job_dir: Path, part: str) -> None:
    """Let others run that part; nothing happens where this process does not hold it."""
    file = _held.pop(_path(job_dir, part), None)
    if file is not None:
        file.close()


def _path(job_dir: Path, part: str) -> Path:
    return job_dir.absolute() / f".{part}.lock"


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
