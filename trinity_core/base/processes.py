"""Inspecting and ending processes. Processes that exit on their own in the meantime are ignored."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trinity_core.base.errors import TrinityError
from trinity_core.base.waits import poll

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES, KEPT_BYTES = 1 << 20, 32 << 20
"""Freed allocations of at least this size return to the system: `LARGE_BYTES` within `freeing_at_once`; `KEPT_BYTES`
otherwise, which is where glibc's own limit settles in a process that frees large blocks."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STARTED = 19
"""Index of the start time in /proc/PID/stat, counted after the name in parentheses."""
LOOK_SECONDS = 0.02
"""Longer than a clock tick (1 to 10 ms), at which a running process's CPU time is updated."""


CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""All control groups of this machine or container, and those of this process."""
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with a control group's memory limit and usage, and the key in `memory.stat` of the page cache that the kernel
reclaims first: cgroup version 2, version 1."""
CPU = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""Files with a control group's CPU quota and period: cgroup version 2, version 1."""


def control_groups(controller: str, root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> list[Path]:
    """Return the folders of the control groups that contain this process and may limit its `memory` or `cpu`.

    A container sees its own group as the root. Jobs of Slurm, systemd and Kubernetes are nested below, and every
    ancestor's limit applies too.
    """
    folders = []
    names = [line.split(":", 2) for line in own.read_text().splitlines()] if own.is_file() else []
    for top, controller_name in ((root, ""), (root / controller, controller)):
        name = next((path for _, controllers, path in names if controller_name in controllers.split(",")), "/")
        folder = top if ".." in name else top / name.lstrip("/")
        folders += [above for above in (folder, *folder.parents) if above.is_relative_to(top)]
    return folders


def memory_limit(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the memory, in bytes, that processes here may use together: the machine's, or a container's or job's
    limit."""
    texts = [_limit(group / limit) for group in control_groups("memory", root, own) for limit, _, _ in MEMORY]
    return min([int(psutil.virtual_memory().total), *(int(text) for text in texts if text)])


def free_memory(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the bytes that processes here can still allocate, within the limit of a container or job."""
    free = int(psutil.virtual_memory().available)
    for group in control_groups("memory", root, own):
        for limit, usage, cached in MEMORY:
            if text := _limit(group / limit):
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free = min(free, int(text) - int((group / usage).read_text()) + int(stat.get(cached, 0)))
    return free


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to its hard limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # a system may allow less than the limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


LEAST_FILES, LEAST_THREADS, LEAST_FILE_BYTES = 512, 256, 1 << 30
"""What the smallest run takes: open files of one process (Ray's raylet has most), threads of all processes (nearly 300
on two cores, more on more), the largest file (Ray's object store)."""


def require_limits() -> None:
    """Raise TrinityError if a limit of the shell that started us is too low for any run, which would hang or end in a
    library's traceback. A soft limit of open files is raised if it may be."""

    def limits(name: int) -> list[int]:
        return [limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in resource.getrlimit(name)]

    faults = []
    files, most_files = limits(resource.RLIMIT_NOFILE)
    if most_files < LEAST_FILES:
        faults.append(f"a process may open {most_files} files (`ulimit -n`), and a run needs {LEAST_FILES}")
    elif files < LEAST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if os.geteuid() != 0:  # root may exceed it
        threads = limits(resource.RLIMIT_NPROC)[0]
        free = threads - (user_threads() if threads < 64 * LEAST_THREADS else 0)
        if free < LEAST_THREADS:
            faults.append(
                f"this user may start {max(free, 0)} more of {threads} processes and threads (`ulimit -u`), and a run "
                f"needs {LEAST_THREADS}"
            )
    size = limits(resource.RLIMIT_FSIZE)[0]
    if size < LEAST_FILE_BYTES:
        faults.append(f"a file may have {size:,} bytes (`ulimit -f`), and a run needs {LEAST_FILE_BYTES:,}")
    if faults:
        raise TrinityError(f"{'; '.join(faults)}. Raise the limit in this shell, or with its administrator.")


def user_threads() -> int:
    """Return the number of threads of this user's processes."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == os.getuid() else 0
    return count


def cores(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the number of cores available to this process: its CPU affinity, limited by the quota of a container or
    job."""
    limits = [len(os.sched_getaffinity(0))]
    for group in control_groups("cpu", root, own):
        for files in CPU:
            if all((group / file).is_file() for file in files):
                quota, period = " ".join((group / file).read_text() for file in files).split()
                if quota.isdigit():  # neither `max` nor -1
                    limits.append(max(1, -(-int(quota) // int(period))))
    return min(limits)


@contextmanager
def freeing_at_once() -> Iterator[None]:
    """Return memory freed in the block to the system at once, where malloc would keep blocks of up to 32 MB."""
    malloc = ctypes.CDLL(None)
    malloc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        malloc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # glibc's own default until `mallopt` is called
            malloc.mallopt(M_TRIM_THRESHOLD, 2 * KEPT_BYTES)
        malloc.malloc_trim(0)


def _limit(path: Path) -> str:
    text = path.read_text().strip() if path.is_file() else ""
    return text if text.isdigit() else ""


YIELDING = 10
"""Added to the niceness: next to a busy thread of the run, the process gets a tenth of a core, otherwise all of it."""


def yield_cores(pid: int) -> None:
    """Let a process use the cores that we leave idle.

    Sessions have their own niceness where Linux groups processes by session.
    """
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + YIELDING, 19)
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(YIELDING))


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)


def start_mark(pid: int) -> str:
    """Return a value that tells a process from a later one with the same id: the boot id and the start in clock ticks.

    Unlike a start time, it does not change when the clock is set. "" on systems without /proc. Raises
    psutil.NoSuchProcess.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[STARTED]
        return f"{BOOT_ID.read_text().strip()} {int(ticks)}"
    except (FileNotFoundError, ProcessLookupError):
        psutil.Process(pid)
        return ""


def still_runs(pid: int, started: float, mark: str = "") -> bool:
    """True if the process with this id and `start_mark` is running.

    Records of older releases have no mark; then the start time (Unix seconds) decides.
    """
    try:
        process = psutil.Process(pid)
        same = start_mark(pid) == mark if mark else abs(process.create_time() - started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_queue_seconds(pid: int) -> float:
    """Return the seconds that a process has waited for a CPU, without a wait in progress; 0 if the system does not
    report it."""
    return _scheduled(pid)[1] * 1e-9


def waits_for_cpu(pid: int) -> bool:
    """True if a process is ready to run but gets no CPU for `LOOK_SECONDS`."""
    first = _scheduled(pid)
    if not any(first) or psutil.Process(pid).status() != psutil.STATUS_RUNNING:
        return False
    time.sleep(LOOK_SECONDS)
    return _scheduled(pid) == first


def _scheduled(pid: int) -> tuple[int, int]:
    """Return nanoseconds on a CPU and in its queue (Linux's sched-stats.rst); zeros if unknown."""
    try:
        ran, waited, _ = map(int, Path(f"/proc/{pid}/schedstat").read_text().split())
        return ran, waited
    except (OSError, ValueError):
        return 0, 0


def families(names: Sequence[str]) -> list[psutil.Process]:
    """Return our children with one of these names, and all their descendants."""
    members = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() in names:
                members += family(child)
    return members


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants. Raises psutil.NoSuchProcess if it has ended."""
    return [process, *process.children(recursive=True)]


def stop(process: psutil.Process, grace: float) -> list[str]:
    """Send SIGTERM to a process and kill what is left of its family after `grace` seconds. Return what was killed."""
    members = family(process)
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    return end(members, grace)


def end(processes: Sequence[psutil.Process], grace: float) -> list[str]:
    """Wait `grace` seconds for processes to end and kill the others. Return what was killed."""
    killed = []
    for process in still_running(processes, grace):
        with suppress(psutil.NoSuchProcess):
            name = f"{process.name()} ({process.pid})"
            process.kill()
            killed.append(name)
    return killed


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that have not ended within `seconds`.

    Zombies count as ended: in a container, the init process may reap them late or never.
    """
    left = list(processes)
    for _ in poll(seconds):
        left = [process for process in left if not _has_ended(process)]
        if not left:
            break
    return left


def _has_ended(process: psutil.Process) -> bool:
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return False
        process.wait(0)  # of a child of ours nothing is left then
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
    return True
