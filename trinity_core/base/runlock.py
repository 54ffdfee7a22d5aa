"""Locks on the components of a run. A lock is released when its process ends, however it ends."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import ANOTHER_ROOT, clear_errors, private_folder, when_room

RUN_TRAINS = "training"
TRAINER_PROCESS = "trainer"
"""Held by the process that trains, which may outlive a killed flow."""
LINGER_SECONDS = 30.0
"""How long the process that trains may outlive a killed flow."""
PIPELINE = "pipeline"
PROBE_SECONDS = 0.5
"""Time allowed for another process that probes a lock and holds it for a moment."""
POLL_SECONDS = 0.1

log = logging.getLogger(__name__)
_held: dict[Path, FileLock] = {}


def hold(job_dir: Path, component: str, wait: float = PROBE_SECONDS) -> None:
    """Keep every other process from running `component` of the run in `job_dir`, until `release` or the process's end.

    Does nothing if this process holds it already. Raises TrinityError if another process does, or if the run's folder
    cannot be written. `wait` is for a holder that is known to be ending; if it has not ended within that many seconds,
    TransientFault is raised, because a later attempt may succeed.
    """
    path = lock_path(job_dir, component)
    if path not in _held:
        _held[path] = _taken(path, component, wait)


def _taken(path: Path, component: str, wait: float = PROBE_SECONDS) -> FileLock:
    """Take the lock of a component and write the holder into it. Raises as `hold` does."""
    lock, mine = _lock(path), f"process {os.getpid()} on {socket.gethostname()}"
    try:
        when_room(partial(private_folder, path.parent), path)
        when_room(partial(_acquire, lock, wait), path)
        when_room(partial(path.write_text, mine), path)
    except Timeout:
        holder = path.read_text(errors="replace") or "a process unknown"
        if wait > PROBE_SECONDS:
            raise TransientFault(
                f"{holder}, the {component} of an earlier attempt of the run in {path.parent}, has not ended within "
                f"{wait:g} s. End it, or start this run again later."
            ) from None
        raise TrinityError(
            f"The run in {path.parent} is already in progress ({component}: {holder}); wait for it or stop it, "
            "or give this one another name."
        ) from None
    except OSError as error:
        raise TrinityError(f"checkpoint_root_dir: the run's folder cannot be written: {error}") from error
    return lock


def release(job_dir: Path, component: str) -> None:
    lock = _held.pop(lock_path(job_dir, component), None)
    if lock is not None:
        lock.release()


@contextmanager
def held(job_dir: Path, component: str) -> Iterator[None]:
    """Keep everyone else, including other threads of this process, from running `component` within a `with` block.

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
    """Hold the lock file at `path` within a `with` block; other processes and threads wait their turn.

    They look every `poll` seconds; a long wait is logged. Raises TransientFault after `seconds`, and TrinityError if
    the folder cannot be written; `instead` as in `clear_errors`.
    """
    lock = _lock(path, poll)
    try:
        with clear_errors("locking", path, instead):
            when_room(partial(private_folder, path.parent), path)
            when_room(partial(_acquire, lock, seconds), path)
    except Timeout:
        raise TransientFault(f"another process has held {path} for {seconds:g} s") from None
    try:
        yield
    finally:
        lock.release()


def is_held(job_dir: Path, component: str) -> bool:
    path = lock_path(job_dir, component)
    if path in _held or not path.exists():
        return path in _held
    try:
        with _lock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True


def components(job_dir: Path) -> list[str]:
    """Return the components of a run that have had locks."""
    return [path.name.removeprefix(".").removesuffix(".lock") for path in job_dir.glob(".*.lock")]


def _acquire(lock: FileLock, wait: float) -> None:
    """Take the lock within `wait` seconds; a long wait is logged. Raises filelock.Timeout."""
    try:
        lock.acquire(timeout=min(wait, PROBE_SECONDS))
    except Timeout:
        if wait <= PROBE_SECONDS:
            raise
        holder = Path(lock.lock_file).read_text(errors="replace") or "another process"
        log.info("waiting up to %g s for %s to release %s", wait, holder, lock.lock_file)
        lock.acquire(timeout=wait - PROBE_SECONDS)


def _lock(path: Path, poll: float = POLL_SECONDS) -> FileLock:
    # Another thread may release the lock. No fallback to a lock by file existence, which would outlive its process.
    return FileLock(path, timeout=0, poll_interval=poll, thread_local=False, fallback_to_soft=False)


def lock_path(job_dir: Path, component: str) -> Path:
    return job_dir.absolute() / f".{component}.lock"
