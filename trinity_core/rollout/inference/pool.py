"""The engines of one model as a pool: requests are batched and balanced over the engines, and lost engines are
replaced.

An engine is lost if it died, if it hangs (it has requests but samples no token for `patience` seconds, however long its
answers), or if it does not load weights in time.

On the CPU all workflows that call `generate` in the same turn of the event loop share one call to each engine, whose
batch then depends only on the tasks. On a GPU, whose kernels do not repeat the last bits anyway, each group is a call
of its own and returns when its own answers have ended: else all would wait for the slowest.

The queue is unbounded: workflows wait for their samples, so `runner_per_model` limits the requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.timing import BusyTimer
from trinity_core.exchange.sync.versions import VersionGone
from trinity_core.rollout.inference.engine import Engine
from trinity_core.rollout.inference.requests import (
    EngineLost,
    GrowingSample,
    PendingRequests,
    Request,
    Sample,
    WeightSource,
    WeightSyncReport,
    assign,
)

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Number of engines replaced before the run fails. Engines that keep dying (too little memory) would not survive
another start."""
PATIENCE = 300.0
"""Time within which an engine with requests in flight must sample a token."""
LOOKS = 10
"""Number of checks of an engine's tokens within `patience`."""
STREAM_SECONDS = 0.03
"""Polling interval for the tokens of streamed requests."""
LOAD_SECONDS = 3600.0
"""Time for an engine to load a version and pass its weight check."""
START_SECONDS = 3600.0
"""Time for Ray to place an engine, and for the engine to load its model, possibly from a slow disk, and compile it."""

T = TypeVar("T")


@dataclass(eq=False)
class _Slot:
    """The slot of one engine and its replacements. `replacing` is set while the slot is empty."""

    index: int
    handle: Engine
    load: int = 0
    scoring: int = 0
    scored: int = 0
    """Scoring requests answered so far."""
    loading: bool = False
    """True while weights are loaded; the engine samples nothing then."""
    replacing: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the pool has given up on its engine and stopped waiting for that engine's answers."""


@dataclass
class EnginePool:
    """The `engines` of the model in `model_path`. Used from one event loop."""

    engines: Sequence[Engine]
    model_path: str
    """Model folder of replacements."""
    max_restarts: int = MAX_RESTARTS
    sleeps: bool = False
    """True if its engines start asleep. From `sleep` until the `load` after `wake` they hold no weights, and requests
    wait."""
    patience: float = PATIENCE
    load_seconds: float = LOAD_SECONDS
    restarts: int = 0
    on_gpu: bool = False
    """Known once the engines have started."""
    busy: BusyTimer = field(default_factory=BusyTimer)
    """Time during which at least one request was in flight."""
    tokens: int = 0
    _slots: list[_Slot] = field(default_factory=list)
    _asked: list[PendingRequests] = field(default_factory=list)
    _held: tuple[WeightSource, int] | None = None
    _may_have_cached: bool = True
    """False if no engine has sampled since its prefix cache was last emptied."""
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _streamed: dict[str, tuple[_Slot, GrowingSample]] = field(default_factory=dict)
    _looking: asyncio.Task[None] | None = None
    _fault: Exception | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if not self.sleeps:
            self._ready.set()

    async def start(self) -> None:
        """Start all engines concurrently. Raises the first failure."""
        self._slots = [_Slot(index, handle) for index, handle in enumerate(self.engines)]
        await asyncio.gather(*(self._start(slot) for slot in self._slots))
        self.on_gpu = any(slot.handle.settings.on_gpu for slot in self._slots)

    async def stop(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*(slot.handle.stop() for slot in self._slots if slot.replacing is None))
        self._slots = []

    async def generate(self, requests: Sequence[Request]) -> list[Sample]:
        """Return the samples in the order of the requests, all from one engine, because they share their prompt.

        Raises `TransientFault` if engines are lost more often than `max_restarts`. Cancelling the call cancels the
        requests.
        """
        return await self._samples(requests)

    async def stream(self, request: Request) -> AsyncIterator[tuple[Sample, bool]]:
        """Yield the sample of a request in parts as it grows; the last part has True.

        Parts already yielded stay: if the engine is lost, another one continues after them. Raises what `generate`
        raises; closing the generator cancels the request.
        """
        growth, sent = GrowingSample(), 0
        asking = asyncio.get_running_loop().create_task(self._samples([request], growth))
        asking.add_done_callback(lambda _: growth.changed.set())
        try:
            while not asking.done():
                await growth.changed.wait()
                growth.changed.clear()
                if not asking.done() and growth.handed is not None:
                    yield growth.handed.part(slice(sent, None)), False
                    sent = len(growth.handed.tokens)
            yield asking.result()[0].part(slice(sent, None)), True
        finally:
            asking.cancel()

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probs (temperature 1, nats) of a sequence's tokens after the first, from the least busy
        engine.

        Raises what `generate` raises, and `InputError` for a sequence that is too long.
        """
        while True:
            self.check()
            await self._ready.wait()
            slot = min(self._slots, key=lambda one: (one.replacing is not None, one.load + one.scoring))
            if slot.replacing is not None:
                await asyncio.wait([slot.replacing], timeout=START_SECONDS)
                continue
            handle, slot.scoring = slot.handle, slot.scoring + 1
            try:
                return await self._scored(slot, handle.score(tokens))
            except EngineLost as lost:
                if slot.handle is handle:
                    self._replace(slot, lost)
            finally:
                slot.scoring -= 1

    async def _scored(self, slot: _Slot, call: Coroutine[Any, Any, list[float]]) -> list[float]:
        """Return the engine's answer. Raises EngineLost if it answers no scoring request at all for `patience`."""
        scoring, lost = asyncio.ensure_future(call), slot.lost
        try:
            while True:
                scored_before = slot.scored
                try:
                    scores = await _answer(slot, asyncio.shield(scoring), self.patience, "scored a sequence")
                except EngineLost:
                    if scoring.done() or lost.is_set() or not (slot.loading or slot.scored > scored_before):
                        raise
                else:
                    slot.scored += 1
                    return scores
        finally:
            scoring.cancel()

    async def _samples(self, requests: Sequence[Request], growth: GrowingSample | None = None) -> list[Sample]:
        self.check()
        await self._ready.wait()
        loop = asyncio.get_running_loop()
        self._may_have_cached = True
        pending = PendingRequests(requests, loop.create_future(), growth)
        if not self._asked:
            loop.call_soon(self._dispatch)
        self._asked.append(pending)
        with self.busy:
            try:
                samples = await pending.future
            except asyncio.CancelledError:
                self._give_up(requests)
                raise
        self.tokens += sum(len(sample.tokens) for sample in samples)
        return samples

    @property
    def held_version(self) -> int | None:
        """The version that the engines load or hold; None before the first load, and after `sleep`."""
        return None if self._held is None else self._held[1]

    @property
    def holds_weights(self) -> bool:
        """False from `sleep` until the next `load`."""
        return self._ready.is_set()

    def check(self) -> None:
        """Raise the fault after which no request is served, if there was one."""
        if self._fault is not None:
            raise self._fault

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """Load `version` in all engines; return the slowest one's report. Raises what `Engine.load` raises, once no
        engine is loading."""
        self._held = (source, version)
        results = await asyncio.gather(*(self._load(slot) for slot in self._slots), return_exceptions=True)
        reports: list[WeightSyncReport] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            reports.append(result)
        self._may_have_cached = any(slot.load for slot in self._slots)
        self._ready.set()
        return max(reports, key=lambda report: report.seconds)

    async def wake(self) -> None:
        """Wake all engines and replace lost ones; `load` comes next. Raises what `Engine.wake` raises."""
        await asyncio.gather(*(self._wake(slot) for slot in self._slots))

    async def _wake(self, slot: _Slot) -> None:
        try:
            await _answer(slot, slot.handle.wake(), self.load_seconds, "woken up")
        except EngineLost as lost:
            self._replace(slot, lost)
        if slot.replacing is not None:
            await slot.replacing

    async def sleep(self) -> None:
        """Put all engines to sleep; requests in flight are aborted."""
        self._ready.clear()
        self._held = None
        await asyncio.gather(*(self._sleep(slot) for slot in self._slots))
        self._may_have_cached = False

    async def _sleep(self, slot: _Slot) -> None:
        while True:
            if slot.replacing is not None:
                await slot.replacing
            try:
                return await _answer(slot, slot.handle.sleep(), self.load_seconds, "fallen asleep")
            except EngineLost as lost:
                self._replace(slot, lost)

    async def reset_prefix_cache(self) -> None:
        """Empty the engines' prefix caches unless they are empty. Not with requests in flight.

        A cached prefix is not recomputed. That changes which tokens an engine computes together, and with it the last
        bits of log-probs; after a resume the caches are empty.
        """
        if self._may_have_cached:
            await asyncio.gather(*(self._reset_prefix_cache(slot) for slot in self._slots if slot.replacing is None))
            self._may_have_cached = False

    async def _reset_prefix_cache(self, slot: _Slot) -> None:
        try:
            await _answer(slot, slot.handle.reset_prefix_cache(), self.patience, "emptied its prefix cache")
        except EngineLost as lost:
            self._replace(slot, lost)

    async def _load(self, slot: _Slot) -> WeightSyncReport:
        assert self._held is not None
        began = time.perf_counter()
        if slot.replacing is None:
            slot.loading = True
            try:
                return await _answer(slot, slot.handle.load(*self._held), self.load_seconds, "loaded the weights")
            except EngineLost as lost:
                self._replace(slot, lost)
            finally:
                slot.loading = False
        assert slot.replacing is not None
        await slot.replacing
        return WeightSyncReport(self._held[1], time.perf_counter() - began, None)

    # ---- sending ----

    def _dispatch(self) -> None:
        asked, self._asked = [pending for pending in self._asked if not pending.future.done()], []
        slots = [slot for slot in self._slots if slot.replacing is None] or self._slots
        shares = assign([len(pending.requests) for pending in asked], [slot.load for slot in slots])
        for slot, share in zip(slots, shares, strict=True):
            calls = [[index] for index in share] if self.on_gpu else [share] if share else []
            for call in calls:
                self._begin(self._serve(slot, [asked[i] for i in call]))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    async def _serve(self, slot: _Slot, batch: list[PendingRequests]) -> None:
        requests = [request for pending in batch for request in pending.requests]
        slot.load += len(requests)
        try:
            if slot.replacing is not None:
                await slot.replacing
                batch = [pending for pending in batch if not pending.future.done()]  # others were cancelled meanwhile
            if slot.watching is None or slot.watching.done():
                slot.watching = self._begin(self._watch(slot))
            self._look_at(slot, batch)
            asked = [request for pending in batch for request in pending.requests]
            samples = (await _answer(slot, slot.handle.generate(asked))).unpack()
        except EngineLost as lost:
            self._replace(slot, lost)
            self._again(batch)
            return
        except (TrinityError, TransientFault) as error:
            for pending in batch:
                pending.fail(error)
            return
        finally:
            slot.load -= len(requests)
            for request in requests:
                self._streamed.pop(request.key, None)
        for pending in batch:
            count = len(pending.requests)
            pending.finish(samples[:count])
            samples = samples[count:]

    def _again(self, batch: list[PendingRequests]) -> None:
        if self._fault is not None:
            for pending in batch:
                pending.fail(self._fault)
            return
        for pending in batch:
            pending.resume()
        self._asked += batch
        self._dispatch()

    # ---- streaming: one poll of each engine serves all its streamed requests; others cost nothing ----

    def _look_at(self, slot: _Slot, batch: list[PendingRequests]) -> None:
        for pending in batch:
            if pending.growth is not None:
                self._streamed[pending.requests[0].key] = (slot, pending.growth)
        if self._streamed and (self._looking is None or self._looking.done()):
            self._looking = self._begin(self._poll_streams())

    async def _poll_streams(self) -> None:
        while self._streamed:
            await asyncio.sleep(STREAM_SECONDS)
            slots = {slot.index: slot for slot, _ in self._streamed.values() if slot.replacing is None}
            await asyncio.gather(*(self._poll(slot) for slot in slots.values()))

    async def _poll(self, slot: _Slot) -> None:
        counts = {key: growth.known for key, (its, growth) in self._streamed.items() if its is slot}
        lost = slot.lost
        try:
            sampled = await _answer(slot, slot.handle.so_far(counts), self.patience, "reported its samples")
        except EngineLost as error:  # callers waiting for its answers get the error too
            log.debug("nothing to stream: %s", error)
            return
        if lost.is_set():  # its requests continue elsewhere, after the parts handed out so far
            return
        for key, sample in sampled.items():
            if key in self._streamed:
                self._streamed[key][1].grow(sample)

    def _give_up(self, requests: Sequence[Request]) -> None:
        keys = [request.key for request in requests]
        for slot in self._slots:
            if slot.load and slot.replacing is None:
                self._begin(self._abort(slot, keys))

    async def _watch(self, slot: _Slot) -> None:
        """Replace the engine if it hangs. Ends when no request is in flight."""
        handle, sampled, since = slot.handle, -1, time.monotonic()
        while True:
            await asyncio.sleep(self.patience / LOOKS)
            if not slot.load or slot.handle is not handle:
                return
            last_sampled = sampled
            with suppress(TimeoutError, EngineLost):  # callers waiting for its answers get the error
                sampled = await asyncio.wait_for(handle.sampled(), self.patience)
            now = time.monotonic()
            if sampled != last_sampled or slot.loading:
                since = now
            elif now - since >= self.patience and slot.handle is handle:
                self._replace(slot, EngineLost(f"it has requests and sampled no token for {now - since:.0f} s"))
                return

    async def _abort(self, slot: _Slot, keys: list[str]) -> None:
        try:
            await _answer(slot, slot.handle.abort(keys), self.patience, "given requests up")
        except EngineLost as lost:
            log.debug("nothing to abort: %s", lost)

    # ---- replacing ----

    def _replace(self, slot: _Slot, lost: EngineLost) -> None:
        """Start a new engine in `slot`; after `max_restarts` set the pool's fault instead."""
        if slot.replacing is not None:
            return
        self._count(slot, lost)
        slot.lost.set()
        slot.watching = None  # each engine has its own watcher; the old one ends on its own
        slot.replacing = asyncio.get_running_loop().create_task(self._revive(slot))
        slot.replacing.add_done_callback(_retrieve_error)

    def _count(self, slot: _Slot, lost: EngineLost) -> None:
        self.restarts += 1
        if self.restarts > self.max_restarts:
            self._fault = TransientFault(f"engines were lost {self.restarts} times, most recently: {lost}")
        else:
            log.warning("engine %d is replaced (%d of %d): %s", slot.index, self.restarts, self.max_restarts, lost)

    async def _revive(self, slot: _Slot) -> None:
        """Start a new engine with the weights that the others hold; repeat if it is lost in the meantime."""
        while True:
            if self._fault is not None:
                raise self._fault
            try:
                await self._succeed(slot)
            except EngineLost as lost:
                self._count(slot, lost)
            except (TrinityError, TransientFault) as error:
                self._fault = error
                raise
            else:
                slot.replacing = None
                return

    async def _succeed(self, slot: _Slot) -> None:
        slot.handle = await slot.handle.successor(self.model_path)
        slot.lost = asyncio.Event()
        await self._start(slot)
        if self.sleeps:  # engines are replaced while they are awake
            await _answer(slot, slot.handle.wake(), self.load_seconds, "woken up")
        held = None
        while self._held is not None and held != self._held:  # the others may load a newer version meanwhile
            held = self._held
            await _answer(slot, self._load_held(slot, *held), self.load_seconds, "loaded the weights")

    async def _start(self, slot: _Slot) -> None:
        await _answer(slot, slot.handle.start(), START_SECONDS, "started")

    async def _load_held(self, slot: _Slot, source: WeightSource, version: int) -> None:
        """Load the version that the other engines hold, or the newest if it is gone. Each token has its version.

        The newest one may be older if the trainer goes back to a checkpoint: the explorer then starts over.
        """
        try:
            await slot.handle.load(source, version)
        except VersionGone:
            newest = source.newest()
            if newest is None or newest == version:
                raise
            await slot.handle.load(source, newest)


async def _answer(slot: _Slot, call: Awaitable[T], seconds: float | None = None, done: str = "") -> T:
    """Return the engine's answer. Raises EngineLost on timeout (`done` describes the call), or once the pool has given
    up on it."""
    answer, lost = asyncio.ensure_future(call), asyncio.ensure_future(slot.lost.wait())
    try:
        await asyncio.wait({answer, lost}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise EngineLost("it was given up" if lost.done() else f"it has not {done} within {seconds:g} s")
    finally:
        answer.cancel()
        lost.cancel()


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve a task's error, which is kept as the pool's fault, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
