"""The GPUs of this machine that the process may use, and those of them that its Ray gets."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from trinity_core.base.waits import poll

RELEASE_SECONDS = 30.0
"""Time for processes that have just ended, such as those of a killed run, to release their GPUs."""
POLL_SECONDS = 0.5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    """Name in `CUDA_VISIBLE_DEVICES`: the index that `nvidia-smi` shows, or a UUID."""
    uuid: str
    memory: int = 0
    """Memory in bytes; 0 if unknown."""
    processes: tuple[int, ...] = ()
    """Ids of the processes that compute on it; a container does not see those of others."""


def visible(gpus: Sequence[Gpu], allowed: str | None) -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` allows, in its order; all of them if it is None.

    Parsed as CUDA does: entries are indices or prefixes of UUIDs, and everything after an entry that matches none is
    ignored. A slice of a GPU (`MIG-…`) is taken as is.
    """
    if allowed is None:
        return list(gpus)
    listed: list[Gpu] = []
    for entry in (part.strip() for part in allowed.split(",")):
        slices = [Gpu(entry, entry)] if entry.startswith("MIG-") else []
        fitting = [gpu for gpu in gpus if gpu.name == entry or (entry[:1] == "G" and gpu.uuid.startswith(entry))]
        if not fitting + slices:
            break
        listed.append(replace((slices or fitting)[0], name=entry))
    return listed


def survey() -> list[Gpu]:
    """Return the GPUs that this process may use; none without an NVIDIA driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # checked first, because importing Ray takes a second
    except OSError:
        return []
    from ray._private.thirdparty import pynvml  # nvidia-ml-py, as Ray carries it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            absent = pynvml.NVMLError_NotSupported  # type: ignore[attr-defined]  # where the CPU and GPU share memory
            processes: tuple[int, ...] = ()
            memory = 0
            with suppress(absent):
                processes = tuple(process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
            with suppress(absent):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
            gpus.append(Gpu(str(index), pynvml.nvmlDeviceGetUUID(handle), memory, processes))
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def smallest_memory(gpus: Sequence[Gpu]) -> int:
    """Return the bytes of memory of the smallest GPU; 0 without GPUs."""
    return min((gpu.memory for gpu in gpus), default=0)


@dataclass(frozen=True, slots=True)
class TakenGpus:
    """The GPUs that this process's Ray assigns. Other runs of this account leave them alone until `release`."""

    shown: str | None = None
    """`CUDA_VISIBLE_DEVICES` for Ray; None leaves what there is, of which Ray assigns the first ones."""
    locks: tuple[IO[str], ...] = ()

    def release(self) -> None:
        for lock in self.locks:
            if not lock.closed:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may also have the file open
                lock.close()


def take_gpus(count: int, folder: Path) -> TakenGpus:
    """Take `count` GPUs on which no process computes, and which no other run has taken: of all, or if
    `CUDA_VISIBLE_DEVICES` is set the first ones of it.

    A lock for each in `folder` keeps two runs that start at once apart. Waits at most `RELEASE_SECONDS` for GPUs to
    become free. Then the first `count` are taken, and those in use are named in a warning: the GPU may have room for
    both runs.
    """
    chooses = "CUDA_VISIBLE_DEVICES" not in os.environ
    gpus: list[Gpu] = []
    for _ in poll(RELEASE_SECONDS, POLL_SECONDS) if count else ():  # a machine may have broken GPUs that nobody uses
        gpus = survey()
        if len(gpus) < count:
            return TakenGpus()
        free = [gpu for gpu in (gpus if chooses else gpus[:count]) if not gpu.processes]
        locks = _locks(free, count, folder)
        if len(locks) == count:
            names = [gpu.name for gpu in free if gpu.uuid in locks]
            if names == [gpu.name for gpu in gpus[:count]]:
                return TakenGpus(None, tuple(locks.values()))
            log.info("the run gets the GPUs %s: others are in use", ", ".join(names))
            return TakenGpus(",".join(names), tuple(locks.values()))
        TakenGpus(None, tuple(locks.values())).release()
    locks = _locks(gpus[:count], count, folder)
    users = {gpu.name: f"process {gpu.processes[0]}" for gpu in gpus[:count] if gpu.processes}
    users = {gpu.name: "another run" for gpu in gpus[:count] if gpu.uuid not in locks} | users
    if users:
        listed = ", ".join(f"{name} ({user})" for name, user in sorted(users.items()))
        log.warning("other processes use GPUs of this run: %s", listed)
    return TakenGpus(None, tuple(locks.values()))


def _locks(gpus: Sequence[Gpu], count: int, folder: Path) -> dict[str, IO[str]]:
    """Lock up to `count` of these GPUs and return the locks by UUID."""
    locks: dict[str, IO[str]] = {}
    for gpu in gpus:
        if len(locks) == count:
            break
        lock = (folder / f"gpu-{gpu.uuid.replace('/', '_')}.lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            locks[gpu.uuid] = lock
    return locks
