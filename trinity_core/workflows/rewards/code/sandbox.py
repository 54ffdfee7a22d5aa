"""Runs programs written by a model: in their own namespaces where the system permits it, always under limits.

Each program has limits of time, memory, files, processes and output. Without namespaces a program can reach the network
and read files, which is logged once per process. Unless run by root, it has the same user as its parent: it can neither
send signals to the user's processes nor look into their memory, but it can write the user's files.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType

import psutil

from trinity_core.children import Child
from trinity_core.errors import DataError
from trinity_core.processes import run_queue_seconds
from trinity_core.waits import is_readable
from trinity_core.workflows.rewards.code import launcher

log = logging.getLogger(__name__)

VISIBLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
FIRST_UID = 1 << 20
"""User ids of root's sandboxes: each starting process has its own, which owns nothing."""
LOOK_SECONDS = 0.05
START_SECONDS = 60.0
"""Time for a sandbox to start; 30 ms on an idle machine."""
LEFT_SECONDS = 2.0
"""Time for the launcher to end the processes left by a killed program."""
BUSY = 10
"""Factor on the time limit that a lone program may wait for a CPU; beyond it the machine is too busy to judge."""

_numbers = itertools.count()


class SandboxFailed(Exception):
    """A sandbox did not work; this says nothing about the program."""


@dataclass(frozen=True)
class CodeLimits:
    seconds: float = 6.0
    """Time limit, without waits for a CPU."""
    memory_bytes: int = 1 << 30
    """Memory of all its processes together."""
    disk_bytes: int = 64 << 20
    processes: int = 16
    output_bytes: int = 16 << 20


@dataclass
class Sandbox:
    """One program in its sandbox, as a context manager: on exit the program and its child processes are gone."""

    files: Mapping[str, str]
    command: Sequence[str]
    limits: CodeLimits
    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.DEVNULL
    descriptors: Sequence[int] = ()
    """File descriptors passed to the program."""
    _isolation: str = "none"
    _places: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    def __enter__(self) -> Sandbox:
        return self.start(best_isolation())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, isolation: str) -> Sandbox:
        """Start the program. Raises `SandboxFailed` if the sandbox cannot be entered or the program does not exist."""
        self._isolation = isolation
        reading, writing = os.pipe()
        try:
            self._launch(isolation, writing)
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as report:
            begun = is_readable(report.fileno(), START_SECONDS)
            reason = report.read().decode(errors="replace") if begun else f"it did not begin in {START_SECONDS:g} s"
        if reason:
            self.end()
            raise SandboxFailed(f"a sandbox for model-written code did not start: {reason}")
        self._began = time.monotonic()
        return self

    def exceeded(self) -> str:
        """Return the limit that the program has exceeded, as text; "" if none. Raises `SandboxFailed` on a busy
        machine."""
        members = self._members()
        if self._isolation == "none" and _size(Path(self._places[1].name)) > self.limits.disk_bytes:
            return f"wrote more than {self.limits.disk_bytes >> 20} MiB to its folder"
        memory = sum(_resident(member) for member in members)
        if memory > self.limits.memory_bytes:
            return f"used more than {self.limits.memory_bytes >> 20} MiB of memory"
        if len(members) > self.limits.processes:
            return f"started more than {self.limits.processes} processes"
        taken = time.monotonic() - self._began
        if taken <= self.limits.seconds:
            return ""
        if len(members) == 1 and taken - run_queue_seconds(members[0].pid) <= self.limits.seconds:
            if taken > BUSY * self.limits.seconds:
                raise SandboxFailed(f"the machine was too busy to run it: {taken:.0f} s, most of them without a CPU")
            return ""
        return f"took longer than {self.limits.seconds:g} s"

    def restart_clock(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        """Kill the program and its child processes."""
        for member in self._members():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LEFT_SECONDS)  # the launcher ends what they have left
        try:
            self._child.kill(daemons=False)
        except subprocess.TimeoutExpired:
            raise SandboxFailed("a killed program does not end") from None
        for place in self._places:
            place.cleanup()

    def _launch(self, isolation: str, report: int) -> None:
        root, staged = (tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) for _ in range(2))
        self._places = [root, staged]
        for name, text in self.files.items():
            Path(staged.name, name).write_text(text, encoding="utf-8", errors="replace")
        settings = {
            "isolation": isolation,
            "report": report,
            "inherited": [report, *self.descriptors],
            "root": root.name,
            "files": staged.name,
            "visible": [*VISIBLE, *_python()],
            "disk_bytes": self.limits.disk_bytes,
            "uid": FIRST_UID + os.getpid() * 64 % (1 << 28) + next(_numbers) % 64,
            "command": list(self.command),
            "limits": {
                "RLIMIT_AS": self.limits.memory_bytes * 4,
                "RLIMIT_DATA": self.limits.memory_bytes * 4,  # else that of the worker that starts it
                "RLIMIT_FSIZE": self.limits.disk_bytes,
                "RLIMIT_NPROC": self.limits.processes,
                "RLIMIT_NOFILE": 128,
                "RLIMIT_CORE": 0,
                "RLIMIT_CPU": int(self.limits.seconds * BUSY) + 1,
            },
            "environment": {
                "PATH": os.defpath,
                "HOME": ".",
                "LANG": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",
            },
        }
        self._child = Child(
            [sys.executable, "-I", "-S", launcher.__file__, json.dumps(settings)],
            stdin=self.stdin,
            stdout=self.stdout,
            stderr=subprocess.DEVNULL,
            descriptors=(report, *self.descriptors),
            folder=Path("/"),
        )
        self.process = self._child.process

    def _members(self) -> list[psutil.Process]:
        """Return the program and its child processes, without the launcher."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
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
            return _collected(sandbox, sandbox.process.stdout.fileno())


def _collected(sandbox: Sandbox, descriptor: int) -> Ran:
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
    sandbox.end()
    return Ran(bytes(output), exceeded, sandbox.process.returncode)


def python(*arguments: str) -> list[str]:
    """Return a command that runs this Python, with its packages."""
    return [sys.executable, "-s", "-P", "-B", *arguments]


@cache
def best_isolation() -> str:
    """Return `namespaces` if the system permits them, else `none` with a warning in the log."""
    probe = Sandbox({}, ["/bin/true"], CodeLimits())
    try:
        probe.start("namespaces").end()
    except SandboxFailed as failed:
        log.warning(
            "this system permits no namespaces: code that a model wrote runs under limits of time, memory, files and "
            "processes, but can reach the network and read files%s (%s)",
            " and write yours, which may forge verdicts: run as root, or where namespaces are permitted"
            if os.geteuid()
            else "",
            failed,
        )
        _require_python()
        return "none"
    return "namespaces"


def _require_python() -> None:
    """Raise DataError if no code can run here: root's code runs as another user, who may lack access."""
    probe = Sandbox({}, python("-c", ""), CodeLimits())
    try:
        probe.start("none").end()
    except SandboxFailed as failed:
        raise DataError(
            f"code that a model wrote cannot be run here ({failed}): root's runs as another user, and {sys.executable} "
            "must be readable to all; run as another user, or install Python outside /root"
        ) from failed


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
