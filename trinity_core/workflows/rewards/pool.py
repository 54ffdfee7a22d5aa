"""A pool of processes that score answers and can be killed if they hang.

Verdicts that need no verifier (see `FAST_PATHS`) are made in this process. All other answers go to workers, which start
with the first such answer. If an answer exceeds the timeout, its worker is killed and the answer counts as a verifier
error; a new worker scores the answers behind it. Order is kept. The event loop is never blocked.

Verdicts do not depend on the machine's load: a resumed run must train on the same rows as one that was never killed. So
the timeout excludes the time that the worker waited for a CPU, and if a worker dies, its answer is scored once more,
since something else may have killed it. (When a flow is killed, Ray kills an actor's child processes before the actor,
which may still store a step.)
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import resource
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil

from trinity_core.base.children import START_SECONDS, CallFailed, NoAnswer, Worker
from trinity_core.base.errors import DataError, RewardError, TransientFault, TrinityError, on_failure
from trinity_core.base.plugins import load_plugins
from trinity_core.base.threads import tied
from trinity_core.workflows.rewards.base import (
    FAST_PATHS,
    TIME_LIMITS,
    WARM_UPS,
    Reward,
    RewardFn,
    RewardItem,
    completed,
    scored,
)
from trinity_core.workflows.rewards.functions import REWARD_FNS, misfit

NO_NUMBER = "the reward function gave no number"
"""How the error of a reward begins whose function returned something else."""


class RewardWorker:
    """Scores answers with limited memory, so that a formula like 9^9^9 is a verifier error and does not exhaust the
    machine.

    Memory used by importing reward functions' modules does not count.
    """

    def __init__(self, plugin_dir: str | None, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        load_plugins(plugin_dir)
        self._ready: set[str] = set()

    def prepare(self, name: str) -> None:
        """Import and warm up a reward function, once. Raises TrinityError if there is no such function."""
        if name not in self._ready:
            _, most = resource.getrlimit(resource.RLIMIT_DATA)  # unchanged: a sandbox started here has its own limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            REWARD_FNS.resolve(name)
            WARM_UPS.get(name, lambda: None)()
            self._ready.add(name)
            memory = psutil.Process().memory_info().data + self._memory_bytes
            limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))

    def score(self, name: str, item: RewardItem) -> dict[str, Any]:
        """Return the arguments of `Reward`. Raises what the reward function raises, and TrinityError if it does not
        take an answer by these names."""
        score = REWARD_FNS.resolve(name)
        inputs: dict[str, Any] = {
            "prompt": item.prompt, "response": item.response, "truth": item.truth, "task": item.task,
        }  # fmt: skip
        if "response_tokens" in inspect.signature(score).parameters:
            inputs["response_tokens"] = item.response_tokens
        if fault := misfit(name, score, inputs, item.args):
            raise TrinityError(fault)
        try:
            result = completed(score(**inputs, **item.args))
        except Exception as error:
            error.add_note(_place(error, score))
            raise
        try:
            verdict = scored(result)
        except (TypeError, ValueError) as error:
            return {"error": f"{NO_NUMBER}: {error}"}
        return {"parts": verdict.parts, "counts": verdict.counts}


def _place(error: Exception, function: RewardFn) -> str:
    """Return file and line of a plugin's reward function that raised an error; "" for our own functions."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    ours = function.__module__.startswith("trinity_core.")
    return "" if ours or not lines else f"({file}, line {lines[-1]})"


WORKER = "trinity_core.workflows.rewards.pool:RewardWorker"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MAX_DEATHS = 2
"""Number of workers that may die while scoring one answer before it counts as a verifier error."""
MOST_WORKERS = 16
"""Limit of the default number: each may use `RewardPool.memory_gib`, and all of them start with the first answers."""
MAX_STARTS = 3
"""Number of consecutive workers that may die at startup before the run fails."""


def usual_workers(cores: int) -> int:
    """Default number of workers on a machine with this many cores, which engines and trainer use too."""
    return min(max(1, cores // 2), MOST_WORKERS)


class RewardRunner(Protocol):
    """The pool's interface for workflows."""

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """Return one reward for each item, in order."""

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """`score` for workflows that run in a thread."""


@dataclass(slots=True)
class RewardPool:
    """Scores answers in up to `workers` processes, each answer within `timeout` seconds, or longer (`TIME_LIMITS`)."""

    workers: int = 2
    timeout: float = 10.0
    plugin_dir: str | None = None
    """Folder whose modules each worker imports, for custom reward functions."""
    memory_gib: float = 4.0
    """Memory limit of a worker while it scores an answer."""
    started: int = 0
    """Number of processes started; more than `workers` means that some were killed."""
    _idle: queue.SimpleQueue[Worker] = field(default_factory=queue.SimpleQueue, repr=False)
    _threads: ThreadPoolExecutor | None = field(default=None, repr=False)

    async def score(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """Return one reward for each item, in order.

        A verifier that times out, dies twice or raises gives a Reward with an `error`. Raises DataError if the reward
        function does not exist or cannot work with this data set, RewardError if it returns an invalid accuracy.
        """
        rewards = self._begin(name, items)
        try:
            return [await asyncio.wrap_future(one) if isinstance(one, Future) else one for one in rewards]
        finally:
            _cancel(rewards)

    def score_sync(self, name: str, items: Sequence[RewardItem]) -> list[Reward]:
        """`score` for callers without an event loop; it blocks."""
        rewards = self._begin(name, items)
        try:
            return [one.result() if isinstance(one, Future) else one for one in rewards]
        finally:
            _cancel(rewards)

    def close(self) -> None:
        """End the processes. Scoring again starts new ones."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        while not self._idle.empty():
            self._idle.get().kill()

    def _begin(self, name: str, items: Sequence[RewardItem]) -> list[Reward | Future[Reward]]:
        """Return the reward of each item, or a future for one that needs a worker."""
        fast = FAST_PATHS.get(name)
        parts = [fast(response=item.response, truth=item.truth, **item.args) if fast else None for item in items]
        judged = [None if part is None else _reward(name, parts=part) for part in parts]
        threads = self._threads = self._threads or ThreadPoolExecutor(self.workers, thread_name_prefix="reward")
        return [
            reward or tied(threads.submit(self._score, name, item)) for reward, item in zip(judged, items, strict=True)
        ]

    def _score(self, name: str, item: RewardItem) -> Reward:
        """Runs in one of the pool's threads, of which there are as many as workers."""
        deaths = 0
        while True:
            worker = self._prepared(name)
            try:
                with on_failure(worker.kill):
                    reward = self._verdict(worker, name, item)
            except NoAnswer as failure:
                deaths += failure.died
                if not failure.died or deaths == MAX_DEATHS:
                    who = "the verifier's process" if failure.died else "the verifier"
                    return Reward(error=f"{who} {failure}")
            else:
                self._idle.put(worker)
                return reward

    def _verdict(self, worker: Worker, name: str, item: RewardItem) -> Reward:
        """Raises NoAnswer, DataError and RewardError."""
        longer = TIME_LIMITS.get(name)
        seconds = self.timeout if longer is None else max(self.timeout, longer(item.args))
        try:
            verdict = worker.call("score", name, item, seconds=seconds)
        except CallFailed as failure:
            if failure.is_for_users:
                raise DataError(str(failure), key=failure.key) from None
            if "MemoryError" in failure.kinds:  # it would stay full of what earlier answers have left
                raise NoAnswer(f"had no more of its {self.memory_gib:g} GiB of memory", died=True) from None
            return Reward(error=str(failure))
        return _reward(name, **verdict)

    def _prepared(self, name: str) -> Worker:
        """Return a worker that has imported the reward function.

        A worker that dies during that is replaced. Raises TransientFault if `MAX_STARTS` die, or if one hangs.
        """
        reason = ""
        for _ in range(MAX_STARTS):
            worker = self._take()
            try:
                worker.make({"plugin_dir": self.plugin_dir, "memory_bytes": int(self.memory_gib * 2**30)})
                worker.call("prepare", name, seconds=START_SECONDS)
            except NoAnswer as failure:
                reason = str(failure)
                if not failure.died:
                    break
            except CallFailed as failure:
                worker.kill()
                if failure.is_for_users:
                    raise DataError(str(failure), key=failure.key) from None
                reason = f"failed with {failure}"
            else:
                return worker
        raise TransientFault(f"a process for the reward function '{name}' did not start: it {reason}")

    def _take(self) -> Worker:
        with suppress(queue.Empty):
            while True:
                worker = self._idle.get_nowait()
                if worker.alive:
                    return worker
        self.started += 1
        return Worker(WORKER, environment={**os.environ, **ONE_THREAD})


def _reward(name: str, **fields: Any) -> Reward:
    """Make a `Reward`. Raises RewardError, which names the reward function, for invalid parts."""
    try:
        return Reward(**fields)
    except TrinityError as fault:
        raise RewardError(f"the reward function '{name}': {fault}", key=fault.key) from fault


def _cancel(rewards: Sequence[Reward | Future[Reward]]) -> None:
    for one in rewards:
        if isinstance(one, Future):
            one.cancel()
