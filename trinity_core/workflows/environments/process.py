"""An environment in a process of its own: with another interpreter if its packages clash with ours, and killed with all
that it started if it hangs. The two speak lines of JSON over pipes (`host.py`); nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trinity_core.data.formats import Tool
from trinity_core.waits import is_readable
from trinity_core.workflows.command import end_processes
from trinity_core.workflows.environments.protocol import EnvironmentFailed, Step, as_step, as_tools, missing

HOST = Path(__file__).with_name("host.py")
START_SECONDS = 120.0
"""To import the environment's packages and make it."""
END_SECONDS = 10.0
"""For a process that was killed to be gone."""
MOST_BYTES = 16 << 20
"""Longest reply."""
SHOWN = 300
"""Last characters of the process's output in messages."""


@dataclass(frozen=True)
class Where:
    """Which environment a process serves. Two that are equal can stand in for each other."""

    name: str
    """Its name in messages."""
    target: str
    """`package.module:Class` or `file.py:Class`."""
    python: str = sys.executable


class ProcessEnvironment:
    """See `Environment`. Each call raises EnvironmentFailed, and the process is gone, if there is no answer in time.

    `make` comes first.
    """

    def __init__(self, where: Where, time_limit: float) -> None:
        self.where, self.time_limit = where, time_limit
        self._mark = f"TRINITY_ENVIRONMENT={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._left = b""
        try:
            self._process = subprocess.Popen(
                [where.python, "-I", str(HOST), where.target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, name: value},
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise EnvironmentFailed(f"environment '{where.name}': {where.python} does not start: {error}") from None
        self._answer(time.monotonic() + START_SECONDS, f"{START_SECONDS:g} s to start")

    def make(self, arguments: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Have the environment with these arguments, anew if it has others.

        `columns`: of a task; those named like an argument of its class are arguments too.
        """
        limit = f"{START_SECONDS:g} s to be made"
        self._ask("make", dict(arguments), dict(columns))
        self._answer(time.monotonic() + START_SECONDS, limit)

    def reset(self, seed: int) -> Step:
        """See `Environment`."""
        return self._step("reset", seed)

    def step(self, action: str) -> Step:
        """See `Environment`."""
        return self._step("step", action)

    def tools(self) -> list[Tool]:
        """See `Environment`."""
        found = self._call("tools")
        try:
            return as_tools(found)
        except EnvironmentFailed as error:
            raise self._failed(str(error)) from None

    def close(self) -> None:
        """End the process and all that it started."""
        if self._said.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        end_processes(self._mark)
        self._process.wait(END_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._said):
            with suppress(OSError):
                stream and stream.close()

    @property
    def alive(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def _step(self, call: Literal["reset", "step"], argument: int | str) -> Step:
        found = self._call(call, argument)
        try:
            return as_step(found)
        except EnvironmentFailed as error:
            raise self._failed(str(error)) from None

    def _call(self, name: str, *arguments: Any) -> Any:
        self._ask(name, *arguments)
        limit = f"{self.time_limit:g} s for {name} (workflow_args.time_limit)"
        return self._answer(time.monotonic() + self.time_limit, limit)

    def _ask(self, name: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        request = json.dumps([name, arguments], default=str)  # a column may hold a date
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._failed("its process has ended") from None

    def _answer(self, deadline: float, limit: str) -> Any:
        line = self._line(deadline, limit)
        try:
            reply = json.loads(line)
        except ValueError:
            raise self._failed(f"it said {line[:200]!r}, which is no JSON") from None
        match reply:
            case {"result": found}:
                return found
            case {"error": str(text), "missing": str(package)} if self.where.python == sys.executable:
                self._failed(text)
                raise missing(self.where.name, package)
            case {"error": str(text)}:
                raise self._failed(text)
        raise self._failed(f"it said {line[:200]!r}")

    def _line(self, deadline: float, limit: str) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._left:
            left = deadline - time.monotonic()
            if left <= 0 or not is_readable(descriptor, left):
                raise self._failed(f"it took longer than {limit}")
            read = os.read(descriptor, 1 << 16)
            self._left += read
            if not read:
                raise self._failed("its process has ended")
            if len(self._left) > MOST_BYTES:
                raise self._failed(f"it said more than {MOST_BYTES >> 20} MiB at once")
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _failed(self, reason: str) -> EnvironmentFailed:
        """The error, after the process's end."""
        shown = ""
        if not self._said.closed:
            self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - SHOWN))
            shown = self._said.read().decode(errors="replace").strip()
        self.close()
        return EnvironmentFailed(f"environment '{self.where.name}': {reason}" + (f": {shown}" if shown else ""))


@dataclass
class Hosts:
    """Processes of environments, which are used for one rollout after another."""

    idle: dict[Where, list[ProcessEnvironment]] = field(default_factory=dict)
    _used: Counter[Where] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, where: Where, time_limit: float, most: int, patience: float) -> ProcessEnvironment:
        """A process that serves this environment, of which there are never more than `most`; `make` it.

        Raises EnvironmentFailed if none is free within `patience` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._used[where] < most, patience):
                raise EnvironmentFailed(
                    f"all {most} processes of environment '{where.name}' were in use for {patience:g} s "
                    "(workflow_args.processes)"
                )
            self._used[where] += 1
            waiting = self.idle.setdefault(where, [])
            kept = waiting.pop() if waiting else None
        try:
            if kept is not None and kept.alive:
                kept.time_limit = time_limit
                return kept
            if kept is not None:
                kept.close()
            return ProcessEnvironment(where, time_limit)
        except BaseException:
            self._release(where)
            raise

    def give(self, environment: ProcessEnvironment, reusable: bool) -> None:
        """Take a process back; one that is not to be used again is ended."""
        if not reusable:
            environment.close()
        with self._changed:
            if reusable:
                self.idle.setdefault(environment.where, []).append(environment)
        self._release(environment.where)

    def close(self) -> None:
        """End all processes that are idle."""
        with self._changed:
            ended = [one for waiting in self.idle.values() for one in waiting]
            self.idle.clear()
        for one in ended:
            one.close()

    def _release(self, where: Where) -> None:
        with self._changed:
            self._used[where] -= 1
            self._changed.notify()


HOSTS = Hosts()
"""Of this process. They end with it: their standard input ends then."""
