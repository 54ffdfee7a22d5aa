"""Chooses free GPUs of this machine for a run with its own Ray, and locks them until it ends.

A GPU is free if no process computes on it, its memory is nearly empty apart from programs that draw on its screen, and
no other run has locked it. Memory is checked because a container does not see others' processes, and locks because a
starting run uses no memory yet.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.waits import poll

IDLE_BYTES = 2**30
"""Memory that a free GPU may have in use without a known process."""
SCREEN_BYTES = 4 * 2**30
"""Maximum memory of a program that draws on a GPU's screen, such as a browser. Above it, the program counts as
computing."""
FREE_SECONDS = 30.0
"""Time for processes that have just ended, such as those of a killed run, to release their GPUs."""
POLL_SECONDS = 0.5
LOCKS = Path("/dev/shm")  # noqa: S108 - visible to all users of the machine, empty after a power cut
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
    drawn: int = 0
    """Bytes held by programs on its screen."""
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
            screen: dict[int, int] = {}
            used = whole = 0
            with suppress(absent):
                processes = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
            with suppress(absent):
                drawing = pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
                screen = {process.pid: process.usedGpuMemory or 0 for process in drawing}  # None: it does not say
            with suppress(absent):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
                used, whole = memory.used, memory.total  # used: excludes the driver's own
            user, drawn = user_of(processes, used, screen)
            capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(Gpu(str(index), pynvml.nvmlDeviceGetUUID(handle), user, whole, drawn, capability, cuda))
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get(VISIBLE))


def user_of(processes: Sequence[int], memory: int, screen: Mapping[int, int] | None = None) -> tuple[str, int]:
    """Return the user of a GPU, or "" if it is free, and the bytes held by programs on its screen.

    `processes` compute on it, `memory` is in use. `screen` maps each drawing process to its bytes, 0 if the driver does
    not know them. A browser draws and computes.
    """
    drawing = {process: held for process, held in (screen or {}).items() if held <= SCREEN_BYTES}
    computing = [process for process in (*processes, *(screen or {})) if process not in drawing]
    drawn = sum(drawing.values())
    if computing:
        with suppress(psutil.Error):
            return f"process {computing[0]} ({psutil.Process(computing[0]).name()})", drawn
        return f"process {computing[0]}", drawn
    if memory - drawn > (SCREEN_BYTES if 0 in drawing.values() else IDLE_BYTES):
        return f"a process unknown ({(memory - drawn) / 2**30:.1f} GiB are taken)", drawn
    return "", max(memory, drawn) if drawing else 0


class GpuLocks:
    """GPUs that this process has locked. A lock ends with `release`, or with the process."""

    def __init__(self, folder: Path = LOCKS) -> None:
        self._folder = folder
        self._held: dict[str, tuple[Gpu, IO[bytes]]] = {}

    @property
    def names(self) -> list[str]:
        """The held GPUs' names, as in `CUDA_VISIBLE_DEVICES`."""
        return [gpu.name for gpu, _ in self._held.values()]

    def take(self, wanted: int, look: Callable[[], list[Gpu]] = survey, wait: float = FREE_SECONDS) -> None:
        """Lock `wanted` free GPUs, the first that `look` returns, preferring those without a screen.

        On failure none is held: TrinityError if there are too few, TransientFault if they are not free within `wait`
        seconds.
        """
        if not wanted:  # a machine may have broken GPUs that nobody uses
            return
        announced = False
        for _ in poll(wait, POLL_SECONDS):
            gpus = [self._tried(gpu, wanted) for gpu in sorted(look(), key=lambda gpu: gpu.drawn)]
            if not (why := refusal(gpus, wanted)):
                return
            self.release()
            if wanted > len(gpus):
                raise TrinityError(why)
            if wait and not announced:
                log.info("waiting up to %g s for GPUs: %s", wait, why)
            announced = True
        raise TransientFault(why)

    def release(self) -> None:
        while self._held:
            self._held.popitem()[1][1].close()

    def _tried(self, gpu: Gpu, wanted: int) -> Gpu:
        """Return the GPU with its user. A free one is locked, unless `wanted` are locked already."""
        if gpu.user or len(self._held) >= wanted:
            return gpu
        path = self._folder / f".trinity_gpu_{gpu.uuid}.lock"
        try:
            lock = _opened(path)
        except PermissionError:
            return replace(gpu, user=f"another user, whose lock {path} cannot be read")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read().decode(errors="replace")
            lock.close()
            return replace(gpu, user=f"another run ({holder or 'which has just begun'})")
        with suppress(OSError):  # another user's file
            path.write_text(f"process {os.getpid()}")
        self._held[gpu.uuid] = gpu, lock
        return gpu


def wait_until_free(wanted: int | None, wait: float) -> int:
    """Wait until `wanted` of this machine's GPUs (None: all) are free, and return their number.

    Raises TransientFault, naming the free ones, after `wait` seconds.
    """
    gpus = survey()
    probe = GpuLocks()
    try:
        if 0 < (goal := len(gpus) if wanted is None else wanted) <= len(gpus):
            probe.take(goal, wait=wait)
    finally:
        probe.release()
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


def _opened(path: Path) -> IO[bytes]:
    """Open the lock file, creating it if needed. Another user's file is opened for reading, which is enough for a
    lock."""
    with suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.fchmod(made, 0o644)  # whatever the umask
        os.close(made)
    return path.open("rb")
