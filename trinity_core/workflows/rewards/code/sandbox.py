"""Runs programs written by a model: in bubblewrap (`bwrap`) where it works, always under limits.

In bubblewrap a program has no network and sees no other processes, and no files except the system's and Python's,
which are read-only, and a small disk in memory. As the first process of its namespace it takes its child processes
with it. Without bubblewrap it is a plain process under limits of time, memory, files and processes. Or an endpoint that
speaks SandboxFusion's `POST /run_code` runs the program.
"""

from __future__ import annotations

import base64
import errno
import itertools
import logging
import os
import selectors
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType

import psutil

from trinity_core.base.children import Child
from trinity_core.base.errors import DataError
from trinity_core.base.lazy import httpx
from trinity_core.base.processes import run_queue_seconds, user_threads
from trinity_core.base.waits import is_readable

log = logging.getLogger(__name__)

VISIBLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("null", "random", "urandom")
DISK, WORK = "/tmp", "/tmp/sandbox"  # noqa: S108 - in the sandbox
FIRST_UID = 1 << 20
"""User ids of root's sandboxes: each starting process has its own, which owns nothing."""
SPARE_THREADS = 1024
"""Threads that other processes of the same user may start while a plain program runs."""
LOOK_SECONDS = 0.05
START_SECONDS = 60.0
"""Time for a sandbox to start; 30 ms on an idle machine."""
BUSY = 10
"""Factor on the time limit that a lone program may wait for a CPU; beyond it the machine is too busy to judge."""
ENVIRONMENT = {
    "PATH": os.defpath, "HOME": ".", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}  # fmt: skip
MACHINES = {
    "x86_64": (0xC000003E, (29, 68, 272, 319, 435, 447), 56, 9),
    "aarch64": (0xC00000B7, (194, 186, 97, 279, 435, 447), 220, 222),
}
"""Machine -> its number in filters (`AUDIT_ARCH`); its system calls `shmget`, `msgget`, `unshare`, `memfd_create`,
`clone3` and `memfd_secret`; `clone`; `mmap`."""
CLONE3, CLONE_NEWUSER, MAP_SHARED_ANONYMOUS = 435, 1 << 28, 0x21

_numbers = itertools.count()


class SandboxFailed(Exception):
    """A sandbox did not work; this says nothing about the program."""


@dataclass(frozen=True)
class CodeLimits:
    seconds: float = 6.0
    """Time limit, of each test if a program serves several, without waits for a CPU."""
    memory_bytes: int = 1 << 30
    """Memory of all its processes together."""
    disk_bytes: int = 64 << 20
    processes: int = 16
    output_bytes: int = 16 << 20
    cpu_seconds: float | None = None
    """CPU time of the whole program; None: what suffices for `seconds`."""


@dataclass
class Sandbox:
    """One program in its sandbox, as a context manager: on exit the program and its child processes are gone."""

    files: Mapping[str, str]
    command: Sequence[str]
    limits: CodeLimits
    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.DEVNULL
    stderr: int = subprocess.DEVNULL
    descriptors: Sequence[int] = ()
    """File descriptors passed to the program."""
    _open: ExitStack = field(default_factory=ExitStack)
    _status: int | None = None
    """Where bubblewrap reports the program's start and its exit code."""
    _folder: Path | None = None

    def __enter__(self) -> Sandbox:
        return self.start(best_isolation())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, isolation: str) -> Sandbox:
        """Start the program. Raises `SandboxFailed` if the sandbox does not start."""
        try:
            with ExitStack() as passed:
                self._launch(self._isolated(passed) if isolation == "bwrap" else self._plain(), isolation, passed)
        except OSError as error:
            self._open.close()
            raise SandboxFailed(f"a sandbox for model-written code did not start: {error}") from error
        if self._status is not None and not is_readable(self._status, START_SECONDS):
            self.end()
            raise SandboxFailed(f"a sandbox for model-written code did not begin in {START_SECONDS:g} s")
        self._began = time.monotonic()
        return self

    def exceeded(self, caller: Sandbox | None = None) -> str:
        """Return the limit that the program has exceeded, as text; "" if none. Raises `SandboxFailed` on a busy
        machine. `caller`: whoever takes turns with it, so that its waits for a CPU do not count either."""
        members = self._members()
        if self._folder is not None and _size(self._folder) > self.limits.disk_bytes:
            return f"wrote more than {self.limits.disk_bytes >> 20} MiB to its folder"
        memory = sum(_resident(member) for member in members)
        if memory > self.limits.memory_bytes:
            return f"used more than {self.limits.memory_bytes >> 20} MiB of memory"
        if len(members) > self.limits.processes:
            return f"started more than {self.limits.processes} processes"
        elapsed = time.monotonic() - self._began
        if elapsed <= self.limits.seconds:
            return ""
        waits = sum(run_queue_seconds(member.pid) for member in [*members, *(caller._members() if caller else ())])
        if len(members) == 1 and elapsed - waits <= self.limits.seconds:
            if elapsed > BUSY * self.limits.seconds:
                raise SandboxFailed(f"the machine was too busy to run it: {elapsed:.0f} s, most of them without a CPU")
            return ""
        return f"took longer than {self.limits.seconds:g} s"

    def restart_clock(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        """Kill the program and its child processes. Raises `SandboxFailed` if bubblewrap has not run it."""
        ended = self.process.poll() is not None
        for member in self._members():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        try:
            self._child.kill(daemons=self._folder is not None)
        except subprocess.TimeoutExpired:
            raise SandboxFailed("a killed program does not end") from None
        with self._open:
            if ended and self._status is not None and b'"exit-code"' not in os.read(self._status, 1 << 16):
                raise SandboxFailed("bubblewrap ended before the program began")

    def _isolated(self, passed: ExitStack) -> list[str]:
        """Return the command that enters bubblewrap. Descriptors in `passed` are for it."""
        namespaces = ("ipc", "pid", "net", "uts", *(["user"] if os.geteuid() else []))
        reading, writing = os.pipe()
        self._open.callback(os.close, reading)
        passed.callback(os.close, writing)
        self._status, self._passed = reading, [writing]
        command = ["bwrap", *(f"--unshare-{name}" for name in namespaces)]
        command += ["--die-with-parent", "--new-session", "--as-pid-1"]
        command += ["--perms", "1777", "--size", str(self.limits.disk_bytes), "--tmpfs", DISK]
        for path in (*VISIBLE, *_python()):
            for parent in [*Path(path).parents][-2::-1]:  # bubblewrap's own would be closed to other users
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind-try", path, path]
        command += ["--perms", "0755", "--dir", "/dev", "--symlink", DISK, "/dev/shm"]  # noqa: S108 - in the sandbox
        for device in DEVICES:
            command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        command += ["--proc", "/proc", "--perms", "1777", "--dir", WORK]
        for name, text in self.files.items():
            content = self._memory(text.encode(errors="replace"), passed)
            command += ["--perms", "0644", "--file", str(content), f"{WORK}/{name}"]
        if os.uname().machine in MACHINES:
            command += ["--seccomp", str(self._memory(_filter(*MACHINES[os.uname().machine]), passed))]
        return [*command, "--remount-ro", "/", "--chdir", WORK, "--json-status-fd", str(writing), "--"]

    def _memory(self, content: bytes, passed: ExitStack) -> int:
        """Return a descriptor of a file in memory, to be inherited."""
        file = passed.enter_context(os.fdopen(os.memfd_create("sandbox"), "w+b"))
        file.write(content)
        file.seek(0)
        self._passed.append(file.fileno())
        return file.fileno()

    def _plain(self) -> list[str]:
        """Put the files in a folder of the program's own; nothing else isolates it."""
        self._passed = []
        folder = tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True)
        self._folder = Path(self._open.enter_context(folder))
        for name, text in self.files.items():
            (self._folder / name).write_text(text, encoding="utf-8", errors="replace")
        return []

    def _launch(self, enter: list[str], isolation: str, passed: ExitStack) -> None:
        """Start the program by `setpriv`, which drops root's powers, and `prlimit`."""
        limits = {
            "as": self.limits.memory_bytes * 4,
            "data": self.limits.memory_bytes * 4,  # else that of the worker that starts it
            "fsize": self.limits.disk_bytes,
            "nproc": self.limits.processes,
            "nofile": 128,
            "core": 0,
            "cpu": int(self.limits.cpu_seconds or self.limits.seconds * BUSY) + 1,
        }
        privileges = ["setpriv", "--no-new-privs", "--pdeathsig", "KILL"]
        if os.geteuid() == 0:
            uid = FIRST_UID + os.getpid() * 64 % (1 << 28) + next(_numbers) % 64
            privileges += ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
            if self._folder is not None:
                for path in (self._folder, *self._folder.iterdir()):
                    os.chown(path, uid, uid)
        elif isolation == "none":  # the system counts threads of the whole user
            limits["nproc"] += user_threads() + SPARE_THREADS
        self._child = Child(
            [*enter, *privileges, "prlimit", *(f"--{name}={value}" for name, value in limits.items()), *self.command],
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=self.stderr,
            environment=ENVIRONMENT,
            descriptors=(*self._passed, *self.descriptors),
            folder=self._folder or Path("/"),
        )
        self.process = self._child.process

    def _members(self) -> list[psutil.Process]:
        """Return the program and its child processes, without bubblewrap."""
        try:
            process = psutil.Process(self.process.pid)
            return [*([process] if self._status is None else []), *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(frozen=True)
class Ran:
    """A program's output, and how it ended."""

    output: bytes
    exceeded: str
    """The limit that it exceeded; "" if it ended on its own."""
    status: int


def run_program(files: Mapping[str, str], command: Sequence[str], stdin: str, limits: CodeLimits) -> Ran:
    """Run a program to its end. Raises `SandboxFailed`."""
    with tempfile.TemporaryFile() as text:
        text.write(stdin.encode(errors="replace"))
        text.seek(0)
        with Sandbox(files, command, limits, text.fileno(), subprocess.PIPE) as sandbox:
            assert sandbox.process.stdout is not None
            output, exceeded = _collected(sandbox, sandbox.process.stdout.fileno())
    return Ran(output, exceeded, sandbox.process.returncode)


def run_remotely(url: str, program: str, files: Mapping[str, str], stdin: str, limits: CodeLimits) -> Ran:
    """Run a Python program, next to files, to its end. Raises `SandboxFailed`.

    The endpoint has limits of its own for disk and processes.
    """
    request = {
        "code": program,
        "language": "python",
        "compile_timeout": limits.seconds,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_bytes >> 20,
        "stdin": stdin,
        "files": {name: base64.b64encode(text.encode()).decode() for name, text in files.items()},
    }
    try:
        reply = httpx.post(url, json=request, timeout=limits.seconds + START_SECONDS)
        content = reply.raise_for_status().json()
        if content["status"] == "SandboxError":
            raise SandboxFailed(f"the sandbox at {url} failed: {content['message']}")
        result = content["run_result"]
        exceeded = "" if result["status"] == "Finished" else f"took longer than {limits.seconds:g} s"
        if result["status"] not in ("Finished", "TimeLimitExceeded"):
            raise SandboxFailed(f"the sandbox at {url} could not run the program: {result['stderr']}")
        return Ran((result["stdout"] or "").encode(), exceeded, result["return_code"] or 0)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise SandboxFailed(f"the sandbox at {url} gave no result: {type(error).__name__}: {error}") from error


def _collected(sandbox: Sandbox, descriptor: int) -> tuple[bytes, str]:
    """Return a program's output, and the limit that it exceeded."""
    output, open_, exceeded = bytearray(), True, ""
    with selectors.DefaultSelector() as ready:
        ready.register(descriptor, selectors.EVENT_READ)
        while not exceeded and (open_ or sandbox.process.poll() is None):
            if open_ and ready.select(LOOK_SECONDS):
                piece = os.read(descriptor, 1 << 16)
                output += piece
                open_ = bool(piece)
                if len(output) > sandbox.limits.output_bytes:
                    exceeded = f"wrote more than {sandbox.limits.output_bytes >> 20} MiB"
            elif not open_:
                with suppress(subprocess.TimeoutExpired):
                    sandbox.process.wait(LOOK_SECONDS)
            exceeded = exceeded or sandbox.exceeded()
    return bytes(output), exceeded


def python(*arguments: str) -> list[str]:
    """Return a command that runs this Python, with its packages."""
    return [sys.executable, "-s", "-P", "-B", *arguments]


@cache
def best_isolation() -> str:
    """Return `bwrap` if bubblewrap works here, else `none` with a warning in the log.

    Raises DataError if no code can run here: root's code runs as another user, who may lack access to this Python.
    """
    reason = _fault("bwrap") if shutil.which("bwrap") else "it is not installed"
    if not reason:
        return "bwrap"
    log.warning(
        "code that a model wrote runs as a plain process, NOT isolated: it has limits of time, memory and processes, "
        "but can reach the network and your files, and may forge verdicts. bubblewrap (bwrap) would isolate it (%s)",
        reason,
    )
    if fault := _fault("none"):
        raise DataError(
            f"code that a model wrote cannot be run here ({fault}): root's runs as another user, and {sys.executable} "
            "must be readable to all; run as another user, or install bubblewrap"
        )
    return "none"


def _fault(isolation: str) -> str:
    """Return why this Python cannot run in a sandbox; "" if it can."""
    with tempfile.TemporaryFile() as errors:
        probe = Sandbox({}, python("-c", ""), CodeLimits(), stderr=errors.fileno())
        try:
            probe.start(isolation)
            try:
                status = probe.process.wait(START_SECONDS)
            finally:
                probe.end()
            reason = f"exit code {status}" if status else ""
        except (SandboxFailed, subprocess.TimeoutExpired) as failed:
            reason = str(failed)
        errors.seek(0)
        return f"{reason}: {errors.read().decode(errors='replace').strip()}" if reason else ""


def _filter(machine: int, calls: Sequence[int], clone: int, mmap: int) -> bytes:
    """Return a seccomp program (Linux BPF) that refuses memory which no limit counts.

    That is memory outside every process's resident memory: of `calls`, of shared anonymous mappings, which keep pages
    that a process has dropped from its own, and of file systems that a user namespace may mount. These fail with EPERM,
    as do the calls of other machines' conventions; `clone3` fails with ENOSYS, and libraries call `clone` instead.
    """
    load, mask, equal, at_least, end = 0x20, 0x54, 0x15, 0x35, 0x06
    allowed, refused, unknown = (
        (end, 0, 0, code) for code in (0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS)
    )
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), refused, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refused]
    for call in calls:
        steps += [(equal, 0, 1, call), unknown if call == CLONE3 else refused]
    for call, argument, bits in ((clone, 0, CLONE_NEWUSER), (mmap, 3, MAP_SHARED_ANONYMOUS)):
        steps += [(equal, 0, 5, call), (load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits), (equal, 0, 1, bits)]
        steps += [refused, allowed]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, allowed])


def _python() -> list[str]:
    """Return Python's folders; for a link, as a virtual environment may be one, also the folder that it points to."""
    folders = {Path(folder) for folder in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)}
    return sorted({str(path) for folder in folders for path in (folder.absolute(), folder.resolve())})


def _size(folder: Path) -> int:
    """Return the size in bytes of the files in a folder."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_blocks * 512
    return size


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
