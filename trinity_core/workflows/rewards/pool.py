"""A pool of processes that score answers and can be killed if they hang.

Verdicts that need no verifier (see `FAST_PATHS`) are given in this process. All other answers go to workers, which
start with the first such answer. If an answer takes longer than the time-out, its worker is killed and the answer
counts as a verifier error; a new worker scores the answers behind it. Order is kept. The event loop is never blocked.

Verdicts do not depend on how busy the machine is: a resumed run must train on the same rows as one that was never
killed. So the time-out excludes the time that the worker spent waiting for a CPU, and if a worker dies, its answer is
scored once more, since something else may have killed it. (When a flow is killed, Ray kills an actor's child processes
before the actor, which may still store a step.)
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from trinity_core.errors import DataError, TransientFault
from trinity_core.workflows.rewards.base import FAST_PATHS, TIME_LIMITS, Reward, RewardItem

BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from trinity_core.workflows.rewards.worker import main; "
)
START_SECONDS = 120.0
"""A worker imports its verifier in 1 to 3 s on quiet cores; on busy ones it may take far longer."""
END_SECONDS = 10.0
"""For a worker that was killed, or that has closed its socket, to be gone."""
MAX_DEATHS = 2
"""Workers that may die while they score one answer, before the answer counts as a verifier error."""
MAX_STARTS = 3
"""Workers in a row that may die while they start, before the run fails."""
SHORTEST_POLL = 0.01
"""Seconds. Once the time-out has passed, a worker that waited for a CPU gets at least this long per poll."""


class RewardRunner(Protocol):
    """The pool's interface for workflows."""

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """One reward for each item, in their order."""

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """The same, for workflows that run in a thread."""


@dataclass(frozen=True, slots=True)
class _NoReply:
    """Why a worker gave no reply."""

    reason: str
    died: bool
    """The process ended; False: it took too long."""


class _Worker:
    """One process and our end of its socket. Belongs to one thread at a time."""

    def __init__(self, plugin_dir: str | None, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        arguments = (theirs.fileno(), os.getpid(), memory_bytes, plugin_dir)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT + f"main(*{arguments!r})", json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(ours.detach())
        self.ready: set[str] = set()
        """Reward functions it has imported and warmed up."""

    def send(self, name: str, items: Sequence[RewardItem]) -> None:
        """Ask for verdicts. If the process has died, the next `receive` reports it."""
        with suppress(OSError):
            self.connection.send((name, items))

    def receive(self, timeout: float) -> dict[str, Any] | _NoReply:
        """The next reply, or why there is none within `timeout` seconds, not counting its waits for a CPU."""
        began, waited = time.monotonic(), self._run_queue_seconds()
        left = timeout
        try:
            while left > 0:
                if self.connection.poll(max(left, SHORTEST_POLL)):
                    return json.loads(self.connection.recv_bytes())
                left = timeout - (time.monotonic() - began) + (self._run_queue_seconds() - waited)
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):  # it may have closed its end and go on
                self.process.wait(END_SECONDS)
            return _NoReply(f"the verifier's process ended with exit code {self.process.poll()}", died=True)
        return _NoReply(f"the verifier took longer than {timeout:g} s", died=False)

    def _run_queue_seconds(self) -> float:
        """Seconds so far in which the process was ready to run but had no CPU; 0 if the system does not report it."""
        try:
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            return 0.0

    def prepare(self, name: str) -> _NoReply | None:
        """Import and warm up a reward function; why it could not, if it died or hangs.

        Raises DataError if there is no such function.
        """
        if name in self.ready:
            return None
        self.send(name, ())
        answer = self.receive(START_SECONDS)
        if isinstance(answer, _NoReply):
            return answer
        _raise_fatal(answer)
        self.ready.add(name)
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_SECONDS)
        self.connection.close()


def _raise_fatal(answer: dict[str, Any]) -> None:
    if "fatal" in answer:
        raise DataError(answer["fatal"])


@dataclass(slots=True)
class RewardPool:
    """Scores answers in up to `workers` processes, each answer within `timeout` seconds, or longer (`TIME_LIMITS`)."""

    workers: int = 2
    timeout: float = 10.0
    plugin_dir: str | None = None
    """Folder whose modules each worker imports, for reward functions of the user's own."""
    memory_gib: float = 4.0
    """Address space of a worker."""
    started: int = 0
    """Processes started so far; more than `workers` means that some were killed."""
    _idle: queue.SimpleQueue[_Worker] = field(default_factory=queue.SimpleQueue, repr=False)
    _threads: ThreadPoolExecutor | None = field(default=None, repr=False)

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """One reward for each item, in their order.

        A verifier that times out, dies twice or raises gives a Reward with an `error`. Raises DataError if the reward
        function does not exist or cannot work with this data set.
        """
        rewards, waiting = self._begin(name, items)
        for indices, future in waiting:
            _fill(rewards, indices, await asyncio.wrap_future(future))
        return [reward for reward in rewards if reward is not None]

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """`score` for callers without an event loop; it blocks."""
        rewards, waiting = self._begin(name, items)
        for indices, future in waiting:
            _fill(rewards, indices, future.result())
        return [reward for reward in rewards if reward is not None]

    def close(self) -> None:
        """End the processes. Scoring again starts new ones."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        while not self._idle.empty():
            self._idle.get().kill()

    def _begin(
        self, name: str, items: Sequence[RewardItem]
    ) -> tuple[list[Reward | None], list[tuple[list[int], Future[list[Reward]]]]]:
        """The rewards that need no worker, and a future for each share of the other items, given by their indices."""
        fast = FAST_PATHS.get(name)
        rewards: list[Reward | None] = [None] * len(items)
        if fast is not None:
            for index, item in enumerate(items):
                parts = fast(response=item.response, truth=item.truth, **item.args)
                rewards[index] = None if parts is None else Reward(parts)
        rest = [index for index, reward in enumerate(rewards) if reward is None]
        if not rest:
            return rewards, []
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="reward")
        shares = [share for start in range(self.workers) if (share := rest[start :: self.workers])]
        return rewards, [
            (share, self._threads.submit(self._score, name, [items[index] for index in share])) for share in shares
        ]

    def _score(self, name: str, items: list[RewardItem]) -> list[Reward]:
        """Runs in one of the pool's threads, of which there are as many as workers."""
        rewards: list[Reward] = []
        deaths = 0
        while len(rewards) < len(items):
            worker, before = self._prepared(name), len(rewards)
            try:
                worker.send(name, items[before:])
                no_reply = self._collect(worker, rewards, [self._seconds(name, item) for item in items])
            except BaseException:
                worker.kill()
                raise
            if no_reply is None:
                self._idle.put(worker)
                break
            worker.kill()
            deaths = no_reply.died + (deaths if len(rewards) == before else 0)
            if not no_reply.died or deaths == MAX_DEATHS:
                rewards.append(Reward(error=no_reply.reason))
                deaths = 0
        return rewards

    def _seconds(self, name: str, item: RewardItem) -> float:
        longer = TIME_LIMITS.get(name)
        return self.timeout if longer is None else max(self.timeout, longer(item.args))

    def _collect(self, worker: _Worker, rewards: list[Reward], seconds: Sequence[float]) -> _NoReply | None:
        """Append verdicts, one for each limit; if the worker hangs or dies, return why the next answer has none."""
        while len(rewards) < len(seconds):
            answer = worker.receive(seconds[len(rewards)])
            if isinstance(answer, _NoReply):
                return answer
            _raise_fatal(answer)
            rewards.append(Reward(answer.get("parts"), answer.get("error"), answer.get("counts") or {}))
        return None

    def _prepared(self, name: str) -> _Worker:
        """A worker that has imported the reward function.

        One that dies at that is replaced; raises TransientFault if `MAX_STARTS` die, or if one hangs.
        """
        reason = ""
        for _ in range(MAX_STARTS):
            worker = self._take()
            try:
                no_reply = worker.prepare(name)
            except BaseException:
                worker.kill()
                raise
            if no_reply is None:
                return worker
            worker.kill()
            reason = no_reply.reason
            if not no_reply.died:
                break
        raise TransientFault(f"a process for the reward function '{name}' did not start: {reason}")

    def _take(self) -> _Worker:
        with suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker.process.poll() is None:
                    return worker
                worker.kill()
        # The thread that starts a worker lives as long as the pool: the kernel ties the worker's life to it.
        self.started += 1
        return _Worker(self.plugin_dir, int(self.memory_gib * 2**30))


def _fill(rewards: list[Reward | None], indices: list[int], given: list[Reward]) -> None:
    for index, reward in zip(indices, given, strict=True):
        rewards[index] = reward
