"""The GPUs of this machine that the process may use. Which of them a run gets, CUDA_VISIBLE_DEVICES and Ray decide."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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


def wait_for_release(count: int) -> None:
    """Wait until no process computes on the first `count` GPUs, which Ray will assign, for at most `RELEASE_SECONDS`.

    A process that stays is named in a warning, and the run starts beside it: the GPU may have room for both.
    """
    if not count:  # a machine may have broken GPUs that nobody uses
        return
    users: list[str] = []
    for _ in poll(RELEASE_SECONDS, POLL_SECONDS):
        users = [f"{gpu.name} (process {gpu.processes[0]})" for gpu in survey()[:count] if gpu.processes]
        if not users:
            return
    log.warning("other processes compute on GPUs of this run: %s", ", ".join(users))
