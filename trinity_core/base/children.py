"""Child processes. A `Child` runs any command; a `Worker` is an object in a separate process that serves calls.

Each is killed with all processes it started, daemons included, and none outlives this process by more than a few
seconds, even if this process is killed: `guardian.py` takes care of that. Both find descendants by a variable in the
environment of every child, which its own children inherit.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import psutil

from trinity_core.base import child_server, guardian
from trinity_core.base.processes import die_with_parent, run_queue_seconds, waits_for_cpu

START_SECONDS = 120.0
"""Limit for importing a worker's packages and creating its object: 1 to 3 s on idle cores, far longer on busy ones."""
END_SECONDS = 10.0
SHORTEST_POLL, LONGEST_POLL = 0.01, 60.0
"""Seconds between polls. A worker that waited for a CPU gets at least the shortest poll after its time limit."""

KEPT_OUTPUT = 1 << 20
"""Bytes of output that are read, and above which it is discarded before the next call: a worker may live for days."""

_guardians: dict[int, str] = {}
"""Process id → variable in the environment of its children. A forked process has no guardian yet."""
_lock = threading.Lock()


def ending(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    names = {member.value: member.name for member in signal.Signals}
    return f"signal {-returncode} ({names.get(-returncode, 'unknown')})"


class NoAnswer(Exception):
    """A worker died or did not answer in time, and was killed. A new worker may succeed.

    The message lacks its subject, the worker: "took longer than 3 s".
    """

    def __init__(self, reason: str, died: bool) -> None:
        super().__init__(reason)
        self.died = died
        """True if the process ended on its own, False if it took too long."""


class CallFailed(Exception):
    """A method called in a worker raised an exception; the worker keeps running."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.kinds: Sequence[str] = reply["kinds"]
        self.key: str = reply["key"]
        self.missing: str | None = reply["missing"]
        text = str(reply["error"])
        super().__init__(text if self.is_for_users else f"{self.kinds[0]}: {text}")

    @property
    def is_for_users(self) -> bool:
        return "TrinityError" in self.kinds


class Child:
    """A command that runs as a process in its own session.

    `environment` replaces ours. `descriptors` are passed on. With `keep_output`, stdout and stderr go to a file that
    `output` reads. Raises OSError if the command does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        descriptors: Sequence[int] = (),
        keep_output: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._variable = f"TRINITY_CHILD_{uuid4().hex}"
        marks = {self._variable: "1", _guarded(): "1"}
        self._output: IO[bytes] | None = tempfile.TemporaryFile() if keep_output else None  # noqa: SIM115 - kept
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=self._output or stdout,
            stderr=self._output or stderr,
            env={**(os.environ if environment is None else environment), **marks},
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, daemons: bool = True) -> None:
        """Kill the process and all that it started. Raises TimeoutExpired if the process is not gone in time.

        `daemons`: also kill descendants that left its session, which takes a scan of all processes of this machine.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_SECONDS)
        if daemons:
            guardian.kill_marked(self._variable)

    def output(self, characters: int, secrets: Sequence[str] = ()) -> str:
        """Return the last `characters` of its output, with `***` for each secret; "" if output is not kept."""
        if self._output is None:
            return ""
        self._output.seek(max(0, self.output_bytes() - KEPT_OUTPUT))
        text = self._output.read().decode(errors="replace")
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text[-characters:].strip()

    def output_bytes(self) -> int:
        return self._output.seek(0, os.SEEK_END) if self._output else 0


class Worker(Child):
    """An object in a separate process. Use it from one thread at a time; call `make` first.

    `target` names the class as `package.module:Class` or `file.py:Class`. With a `python` other than ours the class
    must not need this project. `most_bytes` limits a reply.
    """

    def __init__(
        self,
        target: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        keep_output: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        path = [json.dumps(sys.path)] if python == sys.executable else []
        command = [python, "-I", child_server.__file__, str(theirs.fileno()), target, *path]
        with ours, theirs:
            super().__init__(command, environment=environment, descriptors=[theirs.fileno()], keep_output=keep_output)
            self._connection = Connection(ours.detach())
        self._most_bytes = most_bytes

    def make(
        self, arguments: Mapping[str, Any], optional: Mapping[str, Any] | None = None, seconds: float = START_SECONDS
    ) -> None:
        """Create the object, or create it again if the arguments differ. Only those of `optional` that its class takes
        are used.

        Raises NoAnswer, and CallFailed if the class or its import raises.
        """
        self._ask("", (dict(arguments), dict(optional or {})), seconds)

    def call(self, method: str, *arguments: Any, seconds: float = float("inf")) -> Any:
        """Call a method and return its result (JSON or bytes) within `seconds`, not counting its waits for a CPU.

        Arguments are pickled. Raises NoAnswer, and CallFailed if the method raises.
        """
        return self._ask(method, arguments, seconds)

    def _ask(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        if self._output is not None and self.output_bytes() > KEPT_OUTPUT:
            self._output.seek(0)  # the worker shares this file offset
            self._output.truncate()
        try:
            self._connection.send((method, arguments))
            self._wait(seconds)
            reply = json.loads(self._connection.recv_bytes(self._most_bytes))
            if reply.get("bytes"):
                return self._connection.recv_bytes()
        except (EOFError, ConnectionError, ProcessLookupError):
            with suppress(subprocess.TimeoutExpired):  # it may have closed its end and still run
                self.process.wait(END_SECONDS)
            code = self.process.poll()
            self.kill()
            how = "closed its connection and was killed" if code is None else f"ended with {ending(code)}"
            raise NoAnswer(how, died=True) from None
        except OSError:
            self.kill()
            raise NoAnswer(f"gave a reply of more than {self._most_bytes} bytes", died=False) from None
        if "error" in reply:
            raise CallFailed(reply)
        return reply["result"]

    def _wait(self, seconds: float) -> None:
        """Wait for a reply. On a timeout the process is killed and NoAnswer raised; EOFError if the process ends.

        The process itself is watched too, because a forked child would keep the connection open.
        """
        pid = self.process.pid
        began, waited = time.monotonic(), run_queue_seconds(pid)
        left, ended = seconds, os.pidfd_open(pid)
        try:
            while left > 0:
                ready = wait([self._connection, ended], min(max(left, SHORTEST_POLL), LONGEST_POLL))
                if self._connection in ready or self._connection.poll():
                    return
                if ready:
                    raise EOFError
                if not waits_for_cpu(pid):  # else the wait is counted when it is over
                    left = seconds - (time.monotonic() - began) + run_queue_seconds(pid) - waited
        except psutil.NoSuchProcess:  # killed by another thread
            raise EOFError from None
        finally:
            os.close(ended)
        self.kill()
        raise NoAnswer(f"took longer than {seconds:g} s", died=False)


def start_detached(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    outlive_us: bool = True,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command in its own session, with its output appended to `log`. Raises OSError.

    It outlives this process, or else gets SIGTERM when this process ends. `environment` replaces ours. `descriptors`
    are passed on.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=None if outlive_us else partial(die_with_parent, signal.SIGTERM),
        )


def _guarded() -> str:
    """Return the variable that marks this process's children. Starts their guardian first if needed."""
    pid = os.getpid()
    with _lock:
        if pid not in _guardians:
            variable = f"TRINITY_PARENT_{pid}_{uuid4().hex}"
            descriptor = os.pidfd_open(pid)
            try:
                subprocess.run(
                    [sys.executable, "-I", "-S", guardian.__file__, str(descriptor), variable],
                    pass_fds=[descriptor], check=True, timeout=START_SECONDS,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            finally:
                os.close(descriptor)
            _guardians[pid] = variable
    return _guardians[pid]
