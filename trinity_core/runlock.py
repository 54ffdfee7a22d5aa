"""Locks that say which components of a run are in progress. A lock ends with its process, however that ends."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.files import ANOTHER_ROOT, clear_errors, when_room

RUN_TRAINS = "training"
"""The lock of a run that trains."""
TRAINER_PROCESS = "trainer"
"""Held by the process that trains, which may outlive a killed flow."""
LINGER_SECONDS = 30.0
"""How long it may."""
PIPELINE = "pipeline"
"""Held while a pipeline's stages run."""
PROBE_SECONDS = 0.5
"""Time for another process that only looks whether a lock is held, and holds it for that moment."""
POLL_SECONDS = 0.1
"""Time between two attempts to take a lock."""

log = logging.getLogger(__name__)
_held: dict[Path, FileLock] = {}


def hold(job_dir: Path, component: str, wait: float = PROBE_SECONDS) -> None:
    """Keep every other process from running `component` of the run in `job_dir`, until `release` or the process's end.

    This process may hold it already. Raises TrinityError if another one does, or if the run's folder cannot be written.
    `wait` is for a holder that is known to be ending; if it has not ended after so many seconds, TransientFault is
    raised, because another attempt may find it gone.
    """
    path = lock_path(job_dir, component)
    if path not in _held:
        _held[path] = _taken(path, component, wait)


def _taken(path: Path, component: str, wait: float = PROBE_SECONDS) -> FileLock:
    """The lock of a component at `path`, taken and signed. Raises as `hold` does."""
    lock, mine = _lock(path), f"process {os.getpid()} on {socket.gethostname()}"
    try:
        when_room(partial(path.parent.mkdir, parents=True, exist_ok=True), path)
        when_room(partial(_acquire, lock, wait), path)
        when_room(partial(path.write_text, mine), path)
    except Timeout:
        holder = path.read_text(errors="replace") or "a process unknown"
        if wait > PROBE_SECONDS:
            raise TransientFault(
                f"{holder}, the {component} of an earlier attempt at the run in {path.parent}, has not ended within "
                f"{wait:g} s. End it, or start this run again later."
            ) from None
        raise TrinityError(
            f"The run in {path.parent} is already going on ({component}: {holder}); wait for it or stop it, "
            "or give this one another name."
        ) from None
    except OSError as error:
        raise TrinityError(f"checkpoint_root_dir: the run's folder cannot be written: {error}") from error
    return lock


def release(job_dir: Path, component: str) -> None:
    """Let others run that component; nothing happens if this process does not hold it."""
    lock = _held.pop(lock_path(job_dir, component), None)
    if lock is not None:
        lock.release()


@contextmanager
def held(job_dir: Path, component: str) -> Iterator[None]:
    """Keep everybody else, other threads of this process too, from running `component` for a `with` block.

    Raises TrinityError as `hold` does.
    """
    lock = _taken(lock_path(job_dir, component), component)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def one_at_a_time(
    path: Path, seconds: float = LINGER_SECONDS, poll: float = POLL_SECONDS, instead: str = ANOTHER_ROOT
) -> Iterator[None]:
    """Hold the lock file at `path` for the moment of a `with` block; other processes and threads wait their turn.

    They look every `poll` seconds; a wait that lasts is announced. Raises TransientFault if it is not theirs within
    `seconds`, and TrinityError if the folder cannot be written; `instead` as in `clear_errors`.
    """
    lock = _lock(path, poll)
    try:
        with clear_errors("locking", path, instead):
            when_room(partial(path.parent.mkdir, parents=True, exist_ok=True), path)
            when_room(partial(_acquire, lock, seconds), path)
    except Timeout:
        raise TransientFault(f"another process has held {path} for {seconds:g} s") from None
    try:
        yield
    finally:
        lock.release()


def is_held(job_dir: Path, component: str) -> bool:
    """True if this process or another one holds it."""
    path = lock_path(job_dir, component)
    if path in _held or not path.exists():
        return path in _held
    try:
        with _lock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _acquire(lock: FileLock, wait: float) -> None:
    """Take the lock within `wait` seconds; a wait that lasts is announced. Raises filelock.Timeout."""
    try:
        lock.acquire(timeout=min(wait, PROBE_SECONDS))
    except Timeout:
        if wait <= PROBE_SECONDS:
            raise
        holder = Path(lock.lock_file).read_text(errors="replace") or "another process"
        log.info("waiting up to %g s for %s to let go of %s", wait, holder, lock.lock_file)
        lock.acquire(timeout=wait - PROBE_SECONDS)


def _lock(path: Path, poll: float = POLL_SECONDS) -> FileLock:
    # Released by another thread than the one that holds it; a lock by a file's existence would outlive its process.
    return FileLock(path, timeout=0, poll_interval=poll, thread_local=False, fallback_to_soft=False)


def lock_path(job_dir: Path, component: str) -> Path:
    """The lock file of a component of the run in `job_dir`."""
    return job_dir.absolute() / f".{component}.lock"
