"""The engines of one model as one: requests of a tick go out together, balanced; a lost engine is replaced.

All workflows that ask in the same turn of the event loop share one call to each engine. That makes the batch that
an engine sees a function of the tasks alone, and 16 tasks cost one round trip instead of 16.

Bounds: what is in flight is what the workflows wait for, so `runner_per_model` bounds the queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.inference.remote import EngineHandle
from trinity_core.inference.requests import EngineLost, Request, Sample, WeightSource, WeightSyncReport
from trinity_core.timing import BusyTimer

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Engines replaced in one run before it is given up. A machine that kills engines over and over (too little memory) is
not mended by starting them once more."""


@dataclass(eq=False)
class _Ask:
    """Requests that belong together (the samples of one prompt), and who waits for them."""

    requests: Sequence[Request]
    future: asyncio.Future[list[Sample]]


@dataclass(eq=False)
class _Seat:
    """The place of one engine, whoever sits on it. `replacing` is set while there is no engine."""

    index: int
    handle: EngineHandle
    load: int = 0
    """Requests in flight."""
    replacing: asyncio.Task[None] | None = None


@dataclass
class EnginePool:
    """The `engines` of the model in `model_path`. Used from one event loop."""

    engines: Sequence[EngineHandle]
    model_path: str
    """What an engine that takes a lost one's place starts with."""
    max_restarts: int = MAX_RESTARTS
    restarts: int = 0
    busy: BusyTimer = field(default_factory=BusyTimer)
    """Time in which at least one request was in flight."""
    tokens: int = 0
    """Tokens sampled so far."""
    _seats: list[_Seat] = field(default_factory=list)
    _asked: list[_Ask] = field(default_factory=list)
    _held: tuple[WeightSource, int] | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _fault: Exception | None = None

    async def start(self) -> None:
        """Start all engines at once. Raises what the first failing one raises."""
        self._seats = [_Seat(index, handle) for index, handle in enumerate(self.engines)]
        await asyncio.gather(*(seat.handle.start() for seat in self._seats))

    async def stop(self) -> None:
        """End all engines."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*(seat.handle.stop() for seat in self._seats if seat.replacing is None))
        self._seats = []

    async def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """The samples in the order of the requests, all from one engine: their prompt is shared.

        Raises `TransientFault` where engines are lost more often than `max_restarts`. Cancelling gives the requests up.
        """
        if self._fault is not None:
            raise self._fault
        loop = asyncio.get_running_loop()
        ask = _Ask(requests, loop.create_future())
        if not self._asked:
            loop.call_soon(self._dispatch)
        self._asked.append(ask)
        with self.busy:
            try:
                samples = await ask.future
            except asyncio.CancelledError:
                self._give_up(requests)
                raise
        self.tokens += sum(len(sample.tokens) for sample in samples)
        return samples

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """Hand `version` to all engines; the slowest one's account. Raises what `Engine.load` raises."""
        self._held = (source, version)
        return max(await asyncio.gather(*(self._load(seat) for seat in self._seats)), key=lambda done: done.seconds)

    async def _load(self, seat: _Seat) -> WeightSyncReport:
        assert self._held is not None
        began = time.perf_counter()
        if seat.replacing is None:
            try:
                return await seat.handle.load(*self._held)
            except EngineLost as lost:
                self._replace(seat, lost)
        assert seat.replacing is not None
        await seat.replacing
        return WeightSyncReport(self._held[1], time.perf_counter() - began, None)

    # ---- sending ----

    def _dispatch(self) -> None:
        asked, self._asked = [ask for ask in self._asked if not ask.future.done()], []
        seats = [seat for seat in self._seats if seat.replacing is None] or self._seats
        shares = assign([len(ask.requests) for ask in asked], [seat.load for seat in seats])
        for seat, share in zip(seats, shares, strict=True):
            if share:
                self._spawn(seat, [asked[i] for i in share])

    def _spawn(self, seat: _Seat, asks: list[_Ask]) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(seat, asks))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, seat: _Seat, asks: list[_Ask]) -> None:
        requests = [request for ask in asks for request in ask.requests]
        seat.load += len(requests)
        try:
            if seat.replacing is not None:
                await seat.replacing
            samples = (await seat.handle.generate(requests)).unpack()
        except EngineLost as lost:
            self._replace(seat, lost)
            self._again(asks)
            return
        except (TrinityError, TransientFault) as error:
            for ask in asks:
                _fail(ask, error)
            return
        finally:
            seat.load -= len(requests)
        for ask in asks:
            count = len(ask.requests)
            if not ask.future.done():
                ask.future.set_result(samples[:count])
            samples = samples[count:]

    def _again(self, asks: list[_Ask]) -> None:
        if self._fault is not None:
            for ask in asks:
                _fail(ask, self._fault)
            return
        self._asked += asks
        self._dispatch()

    def _give_up(self, requests: Sequence[Request]) -> None:
        keys = [request.key for request in requests]
        for seat in self._seats:
            if seat.load and seat.replacing is None:
                self._serving.add(task := asyncio.get_running_loop().create_task(_abort(seat.handle, keys)))
                task.add_done_callback(self._serving.discard)

    # ---- replacing ----

    def _replace(self, seat: _Seat, lost: EngineLost) -> None:
        """Begin to put a new engine on `seat`, or note that this is beyond mending."""
        if seat.replacing is not None:
            return
        self.restarts += 1
        if self.restarts > self.max_restarts:
            self._fault = TransientFault(f"engines were lost {self.restarts} times, the last time so: {lost}")
        else:
            log.warning("engine %d is replaced (%d of %d): %s", seat.index, self.restarts, self.max_restarts, lost)
        seat.replacing = asyncio.get_running_loop().create_task(self._revive(seat))
        seat.replacing.add_done_callback(_seen)

    async def _revive(self, seat: _Seat) -> None:
        """Start a new engine with the weights that the others hold."""
        if self._fault is not None:
            raise self._fault
        try:
            seat.handle = await seat.handle.successor(self.model_path)
            await seat.handle.start()
            if self._held is not None:
                await seat.handle.load(*self._held)
        except (TrinityError, TransientFault) as error:
            self._fault = error
            raise
        seat.replacing = None


def assign(sizes: Sequence[int], loads: Sequence[int]) -> list[list[int]]:
    """Which engine takes which ask: each ask in turn goes to the least loaded engine, the first of several.

    `sizes` are the requests of each ask, `loads` the requests in flight in each engine. An ask is never split.
    """
    loads = list(loads)
    shares: list[list[int]] = [[] for _ in loads]
    for ask, size in enumerate(sizes):
        engine = min(range(len(loads)), key=loads.__getitem__)
        shares[engine].append(ask)
        loads[engine] += size
    return shares


def _fail(ask: _Ask, error: Exception) -> None:
    if not ask.future.done():
        ask.future.set_exception(error)


def _seen(task: asyncio.Task[None]) -> None:
    """Take note of a task's error: it is kept as the pool's fault too."""
    if not task.cancelled():
        task.exception()


async def _abort(handle: EngineHandle, keys: list[str]) -> None:
    try:
        await handle.abort(keys)
    except EngineLost as lost:
        log.debug("no need to abort: %s", lost)
