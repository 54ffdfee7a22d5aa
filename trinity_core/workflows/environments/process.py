"""An environment in its own process, so that it can use another interpreter, for conflicting packages, and can be
killed with all its child processes if it hangs."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trinity_core.base.children import CallFailed, NoAnswer, Worker
from trinity_core.base.errors import on_failure
from trinity_core.base.timing import BusyTimer
from trinity_core.data.formats import Tool
from trinity_core.workflows.environments.protocol import (
    EXTRA,
    EXTRA_PACKAGES,
    EnvironmentFailed,
    Step,
    as_step,
    as_tools,
    missing,
)

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
SHOWN = 300
"""Number of last characters of the process's output in messages."""
SILENT_SECONDS = 300.0
"""Seconds that a rollout waits for a process before a warning."""


@dataclass(frozen=True)
class Where:
    """The environment that a process serves. Processes with equal values are interchangeable."""

    name: str
    target: str
    """`package.module:Class` or `file.py:Class`."""
    python: str = sys.executable


class ProcessEnvironment:
    """See `Environment`. Each call raises EnvironmentFailed, and the process is ended, if there is no answer in time.

    Call `make` first.
    """

    def __init__(self, where: Where, time_limit: float) -> None:
        self.where, self.time_limit = where, time_limit
        try:
            self._worker = Worker(where.target, python=where.python, keep_output=True, most_bytes=MOST_BYTES)
        except OSError as error:
            raise EnvironmentFailed(f"environment '{where.name}': {where.python} does not start: {error}") from None

    def make(self, arguments: Mapping[str, Any], columns: Mapping[str, Any]) -> None:
        """Make the environment with these arguments; recreate it if it has others.

        `columns`: a task's columns; those named like an argument of the environment's class are arguments too.
        """
        plain = json.loads(json.dumps([arguments, columns], default=str))  # a column may hold a date
        with self._failing("to be made"):
            self._worker.make(*plain)

    def reset(self, seed: int) -> Step:
        with self._failing("for reset (workflow_args.time_limit)"):
            return as_step(self._worker.call("reset", seed, seconds=self.time_limit))

    def step(self, action: str) -> Step:
        with self._failing("for step (workflow_args.time_limit)"):
            return as_step(self._worker.call("step", action, seconds=self.time_limit))

    def tools(self) -> list[Tool]:
        with self._failing("for tools (workflow_args.time_limit)"):
            try:
                return as_tools(self._worker.call("tools", seconds=self.time_limit))
            except CallFailed as failure:
                if "NoSuchMethod" in failure.kinds:
                    return []
                raise

    def close(self) -> None:
        """End the process and its child processes."""
        self._worker.kill()

    @property
    def alive(self) -> bool:
        return self._worker.alive

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        """After a failure, end the process and raise EnvironmentFailed, or the error that names a missing package."""
        try:
            yield
        except NoAnswer as failure:
            reason = f"its process {failure}" if failure.died else f"it {failure} {doing}"
        except CallFailed as failure:
            if failure.missing and self.where.python == sys.executable:
                self.close()
                package = failure.missing
                what = EXTRA if package in EXTRA_PACKAGES else package.replace("_", "-")
                raise missing(self.where.name, package, what) from None
            reason = str(failure)
        except EnvironmentFailed as failure:  # the reply is not a step or a list of tools
            reason = str(failure)
        else:
            return
        self.close()
        output = self._worker.output(SHOWN)
        raise EnvironmentFailed(f"environment '{self.where.name}': {reason}" + (f": {output}" if output else ""))


@dataclass
class Hosts:
    """Processes of environments, reused by one rollout after another."""

    idle: dict[Where, list[ProcessEnvironment]] = field(default_factory=dict)
    _used: Counter[Where] = field(default_factory=Counter)
    _taken: dict[ProcessEnvironment, Callable[[], None]] = field(default_factory=dict)
    """Process in use -> callback that records its return."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(
        self,
        where: Where,
        time_limit: float,
        most: int,
        patience: float,
        queueing: BusyTimer | None = None,
        given_up: threading.Event | None = None,
    ) -> ProcessEnvironment:
        """Return a process that serves this environment, of at most `most`; call its `make` next.

        Waits for other rollouts to return processes, with `queueing` running. Raises EnvironmentFailed if none returns
        one for `patience` seconds, or if `given_up` is set (`give_up`) or `queueing` is over before its turn. If
        `queueing` is given up later, the process is ended.
        """
        given_up, queueing = given_up or threading.Event(), queueing or BusyTimer()
        with self._changed, queueing if self._used[where] >= most else nullcontext():
            while self._used[where] >= most and not given_up.is_set():
                self._wait(where, most, patience)
            if given_up.is_set() or queueing.is_over:
                raise EnvironmentFailed(f"the rollout no longer waits for a process of environment '{where.name}'")
            self._used[where] += 1
            waiting = self.idle.setdefault(where, [])
            idle = waiting.pop() if waiting else None
        with on_failure(partial(self._release, where)):
            if idle is not None and not idle.alive:
                idle.close()
                idle = None
            environment = idle or ProcessEnvironment(where, time_limit)
        environment.time_limit = time_limit
        end = partial(self.give, environment, False)
        self._taken[environment] = partial(queueing.let_go, end)
        queueing.hold(end)
        return environment

    def give_up(self, given_up: threading.Event) -> None:
        """Cancel the `take` that was called with `given_up`, unless it has a process."""
        with self._changed:
            given_up.set()
            self._changed.notify_all()

    def give(self, environment: ProcessEnvironment, reusable: bool) -> None:
        """Return a process; end it unless it is `reusable`. Does nothing if it has been returned.

        Raises subprocess.TimeoutExpired if it cannot be ended.
        """
        given_back = self._taken.pop(environment, None)
        if given_back is None:
            return
        given_back()
        try:
            if reusable:
                with self._changed:
                    self.idle.setdefault(environment.where, []).append(environment)
            else:
                environment.close()
        finally:
            self._release(environment.where)

    def close(self) -> None:
        with self._changed:
            ended = [environment for waiting in self.idle.values() for environment in waiting]
            self.idle.clear()
        for environment in ended:
            environment.close()

    def _wait(self, where: Where, most: int, patience: float) -> None:
        """Wait for a change. Raises EnvironmentFailed if there is none for `patience` seconds."""
        silent = min(SILENT_SECONDS, patience)
        if self._changed.wait(silent):
            return
        if silent < patience:
            log.warning("environment '%s': a rollout has waited %g s for one of %d processes", where.name, silent, most)
            if self._changed.wait(patience - silent):
                return
        raise EnvironmentFailed(
            f"all {most} processes of environment '{where.name}' were in use for {patience:g} s, and no "
            "rollout ended: raise workflow_args.processes, or lower max_turns or time_limit"
        )

    def _release(self, where: Where) -> None:
        with self._changed:
            self._used[where] -= 1
            self._changed.notify_all()  # a single waiter may wait for another environment


HOSTS = Hosts()
"""Hosts of this process, which end with it (`base/children.py`)."""
