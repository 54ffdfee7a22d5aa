"""Chooses free GPUs of this machine for a run with its own Ray.

A GPU is free if no process computes on it and little of its memory is in use, which is checked because a container does
not see others' processes. Runs that start at the same moment may choose the same GPUs: give each its own in
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import psutil

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.waits import poll

IDLE_BYTES = 4 * 2**30
"""Memory that a free GPU may have in use without a known process, such as by programs on its screen."""
FREE_SECONDS = 30.0
"""Time for processes that have just ended, such as those of a killed run, to release their GPUs."""
POLL_SECONDS = 0.5
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    """Name in `CUDA_VISIBLE_DEVICES`: the index that `nvidia-smi` shows, or a UUID."""
    uuid: str
    user: str = ""
    """Description of its user; empty if it is free."""
    memory: int = 0
    """Memory in bytes; 0 if unknown."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) if unknown."""
    driver_cuda: int = 0
    """Highest major version of CUDA that the driver runs, a compatibility package included; 0 if unknown."""

    @property
    def lacks_bfloat16(self) -> bool:
        """True for GPUs older than Ampere (compute capability 8.0), such as T4 and V100, on which vLLM refuses
        bfloat16."""
        return (0, 0) < self.capability < (8, 0)


def visible(gpus: Sequence[Gpu], allowed: str | None) -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` allows, in its order; all of them if it is None.

    Parsed as CUDA does: entries are indices or prefixes of UUIDs, and everything after an entry that matches none is
    ignored. A slice of a GPU (`MIG-…`) is taken as is.
    """
    if allowed is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in allowed.split(",")):
        slices = [Gpu(entry, entry)] if entry.startswith("MIG-") else []
        fitting = [gpu for gpu in gpus if gpu.name == entry or (entry[:1] == "G" and gpu.uuid.startswith(entry))]
        if not fitting + slices:
            break
        chosen.append(replace((slices or fitting)[0], name=entry))
    return chosen


def refusal(gpus: Sequence[Gpu], wanted: int) -> str:
    """Return why fewer than `wanted` GPUs are free, and what to do; empty if there are enough."""
    free = [gpu.name for gpu in gpus if not gpu.user]
    if wanted <= len(free):
        return ""
    named = f" ({', '.join(free)})" if free else ""
    used = "".join(f"; GPU {gpu.name} is used by {gpu.user}" for gpu in gpus if gpu.user)
    return (
        f"The run wants {wanted} of this machine's GPUs, but of {len(gpus)} only {len(free)} are free{named}{used}. "
        f"Wait for them, or set cluster.gpu_per_node to at most {len(free)} (0 runs engines and trainer on the CPU)."
    )


def survey() -> list[Gpu]:
    """Return the GPUs that this process may use, with their current users; none without an NVIDIA driver."""
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
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            absent = pynvml.NVMLError_NotSupported  # type: ignore[attr-defined]  # where the CPU and GPU share memory
            processes: list[int] = []
            used = whole = 0
            with suppress(absent):
                processes = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            with suppress(absent):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
                used, whole = memory.used, memory.total  # used: excludes the driver's own
            user = user_of(processes, used)
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(Gpu(str(index), pynvml.nvmlDeviceGetUUID(handle), user, whole, capability, cuda))
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get(VISIBLE))


def smallest_memory(gpus: Sequence[Gpu]) -> int:
    """Return the bytes of memory of the smallest GPU; 0 without GPUs."""
    return min((gpu.memory for gpu in gpus), default=0)


def user_of(processes: Sequence[int], memory: int) -> str:
    """Return the user of a GPU on which `processes` compute and `memory` bytes are in use; "" if it is free."""
    if processes:
        with suppress(psutil.Error):
            return f"process {processes[0]} ({psutil.Process(processes[0]).name()})"
        return f"process {processes[0]}"
    return f"a process unknown ({memory / 2**30:.1f} GiB are taken)" if memory > IDLE_BYTES else ""


def free_gpus(wanted: int, look: Callable[[], list[Gpu]] = survey, wait: float = FREE_SECONDS) -> list[str]:
    """Return the names of `wanted` free GPUs, the first that `look` returns.

    Raises TrinityError if there are too few, TransientFault if they are not free within `wait` seconds.
    """
    if not wanted:  # a machine may have broken GPUs that nobody uses
        return []
    announced = False
    for _ in poll(wait, POLL_SECONDS):
        gpus = look()
        if not (why := refusal(gpus, wanted)):
            return [gpu.name for gpu in gpus if not gpu.user][:wanted]
        if wanted > len(gpus):
            raise TrinityError(why)
        if wait and not announced:
            log.info("waiting up to %g s for GPUs: %s", wait, why)
        announced = True
    raise TransientFault(why)


def wait_until_free(wanted: int | None, wait: float) -> int:
    """Wait until `wanted` of this machine's GPUs (None: all) are free, and return their number.

    Raises TransientFault, naming the free ones, after `wait` seconds.
    """
    gpus = survey()
    if 0 < (goal := len(gpus) if wanted is None else wanted) <= len(gpus):
        free_gpus(goal, wait=wait)
    return len(gpus)


@contextmanager
def only(names: Sequence[str]) -> Iterator[None]:
    """Within this context, started processes see only these GPUs, numbered as in `nvidia-smi`."""
    if not names:
        yield
        return
    before = {variable: os.environ.get(variable) for variable in (VISIBLE, ORDER)}
    os.environ.update({VISIBLE: ",".join(names), ORDER: before[ORDER] or "PCI_BUS_ID"})
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value
