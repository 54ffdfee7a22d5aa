"""The pool: one call a tick, balanced, and no request is lost with an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import FakeEngine

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.exchange.sync.versions import VersionGone, open_versions
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.inference.requests import (
    EngineLost,
    Request,
    Sample,
    SampleBatch,
    Sampling,
    WeightSource,
    assign,
)
from trinity_core.rollout.inference.settings import EngineSettings

SOURCE = WeightSource("memory", "somewhere")


def ask(name: str, count: int = 2) -> list[Request]:
    prompt = np.array([1, 2], dtype=np.int32)
    return [Request(f"{name}/{i}", prompt, Sampling(max_tokens=8), i) for i in range(count)]


async def started(*engines: FakeEngine, **options) -> EnginePool:
    pool = EnginePool(engines, "model", **options)
    await pool.start()
    return pool


async def until(true) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


async def test_requests_of_one_tick_share_a_call():
    engine = FakeEngine()
    pool = await started(engine)
    samples = await asyncio.gather(*(pool.generate(ask(f"w{i}", i + 1)) for i in range(5)))
    assert [len(sample) for sample in samples] == [1, 2, 3, 4, 5]
    [call] = engine.calls
    assert [request.key for request in call][:3] == ["w0/0", "w1/0", "w1/1"]


async def test_groups_on_a_gpu_do_not_wait_for_each_other():
    engine = FakeEngine(settings=EngineSettings("model", 100, on_gpu=True), hangs_in=(0,))
    pool = await started(engine)
    slow, *others = (asyncio.create_task(pool.generate(ask(f"w{i}", 4))) for i in (1, 0, 2))
    await asyncio.wait_for(asyncio.gather(*others), 60)
    assert not slow.done()
    slow.cancel()
    assert [{request.key.split("/")[0] for request in call} for call in engine.calls] == [{"w1"}, {"w0"}, {"w2"}]


async def test_later_requests_do_not_wait_for_earlier_ones():
    engine = FakeEngine(seconds=0.02)
    pool = await started(engine)
    first = asyncio.create_task(pool.generate(ask("early")))
    await asyncio.sleep(0.005)
    await pool.generate(ask("late"))
    assert first.done()
    assert len(engine.calls) == 2


async def test_a_group_stays_on_one_engine():
    engines = [FakeEngine(), FakeEngine()]
    pool = await started(*engines)
    await asyncio.gather(*(pool.generate(ask(f"w{i}", 4)) for i in range(4)))
    keys = [{request.key.split("/")[0] for request in engine.calls[0]} for engine in engines]
    assert keys == [{"w0", "w2"}, {"w1", "w3"}]


def succeeded_by(engine: FakeEngine, heir) -> FakeEngine:
    """The engine, which `heir()` replaces once it is lost."""

    async def successor(model_path):
        return heir()

    engine.successor = successor
    return engine


@given(st.lists(st.integers(1, 9)), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_assignment_is_complete_and_balanced(sizes, loads):
    shares = assign(sizes, loads)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    ends = [load + sum(sizes[i] for i in share) for load, share in zip(loads, shares, strict=True)]
    used = [end for end, share in zip(ends, shares, strict=True) if share]
    if used:
        assert max(used) - min(ends) <= max(sizes)
    assert shares == assign(sizes, loads)


@pytest.mark.parametrize("fault", ["dies_in", "hangs_in"])
async def test_lost_engine_is_replaced_and_its_requests_repeated(fault):
    engine = FakeEngine(**{fault: (0,)})
    pool = await started(engine, patience=0.2)
    await pool.load(SOURCE, 7)
    samples = await pool.generate(ask("w"))
    assert pool.restarts == 1
    [heir] = engine.heirs
    assert heir.loaded == [(SOURCE, 7)]
    assert samples[0].versions.tolist() == [7, 7, 7]
    assert engine.stopped


async def test_other_engines_take_over_from_a_lost_one():
    dying, living = FakeEngine(dies_in=(0,)), FakeEngine(name="second")
    pool = await started(dying, living)
    assert [len(sample) for sample in await asyncio.gather(*(pool.generate(ask(f"w{i}")) for i in range(2)))] == [2, 2]
    assert {request.key.split("/")[0] for call in living.calls for request in call} == {"w0", "w1"}


async def test_requests_wait_from_sleep_until_the_next_load():
    engines = [FakeEngine(), FakeEngine(name="second")]
    pool = await started(*engines, sleeps=True)
    early = asyncio.create_task(pool.generate(ask("early")))
    await asyncio.sleep(0.01)
    await pool.wake()
    await asyncio.sleep(0.01)
    assert not any(engine.calls for engine in engines) and not pool.holds_weights
    await pool.load(SOURCE, 3)
    await early
    await pool.sleep()
    late = asyncio.create_task(pool.generate(ask("late")))
    await asyncio.sleep(0.01)
    assert not late.done() and pool.held_version is None
    await pool.wake()
    await pool.load(SOURCE, 3)
    await late
    assert engines[0].turns == ["wake", "generate", "sleep", "wake", "generate"]
    assert engines[1].turns == ["wake", "sleep", "wake"]


@pytest.mark.parametrize("lost_in", ["wake", "sleep", "generate"])
async def test_an_engine_lost_in_any_part_of_its_turn_is_replaced(lost_in):
    """The new one is awake with the same weights while the others are, and sleeps with them without weights."""

    class Weak(FakeEngine):
        async def wake(self):
            await super().wake()
            if lost_in == "wake":
                raise EngineLost("gone")

        async def sleep(self):
            await super().sleep()
            if lost_in == "sleep":
                raise EngineLost("gone")

    engine = Weak(dies_in=(0,) if lost_in == "generate" else ())

    pool = await started(engine, sleeps=True)
    await pool.wake()
    await pool.load(SOURCE, 7)
    samples = await pool.generate(ask("w"))
    await pool.sleep()
    assert samples[0].versions.tolist() == [7, 7, 7]
    [heir] = engine.heirs
    assert heir.loaded == [(SOURCE, 7)] * (lost_in != "sleep") and engine.stopped
    generates = ["generate"] * (lost_in != "sleep")
    assert heir.turns == ["wake", *generates, "sleep"]


@pytest.mark.parametrize("call", ["load", "hanging load", "reset_prefix_cache"])
async def test_an_engine_lost_during_a_call_is_replaced(call):
    class Dying(FakeEngine):
        async def load(self, source, version):
            if call == "hanging load":
                await asyncio.Event().wait()
            if call == "load":
                raise EngineLost("gone")
            return await super().load(source, version)

        async def reset_prefix_cache(self):
            raise EngineLost("gone")

    pool = await started(engine := Dying(), load_seconds=0.05 if call == "hanging load" else 60.0)
    assert (await pool.load(SOURCE, 3)).version == 3
    await pool.generate(ask("w"))
    await pool.reset_prefix_cache()
    await pool.generate(ask("again"))
    assert pool.restarts == 1
    assert engine.heirs[0].loaded == [(SOURCE, 3)]
    assert len(engine.heirs[0].calls) == (1 if call == "reset_prefix_cache" else 2)


async def test_a_failed_load_ends_when_no_engine_is_loading():
    """So that the next load does not run beside one of another version."""

    class Slow(FakeEngine):
        async def load(self, source, version):
            await asyncio.sleep(0.05)
            return await super().load(source, version)

    class Gone(FakeEngine):
        async def load(self, source, version):
            raise VersionGone(f"version {version} is gone")

    pool = await started(slow := Slow(), Gone())
    with pytest.raises(VersionGone):
        await pool.load(SOURCE, 3)
    assert slow.loaded == [(SOURCE, 3)]


@pytest.mark.parametrize(("answers", "restarts"), [(True, 0), (False, 4)])
async def test_an_engine_that_scores_is_not_lost_however_many_sequences_wait(answers, restarts):
    """One after the other, as an engine on the CPU does."""

    class Scoring(FakeEngine):
        async def score(self, tokens):
            async with turn:
                await (asyncio.sleep(0.03) if answers else asyncio.Event().wait())
            return [0.0]

        async def successor(self, model_path):
            return self

    turn = asyncio.Lock()
    pool = await started(Scoring(), patience=1)
    scores = await asyncio.gather(*(pool.score([1, 2]) for _ in range(40)), return_exceptions=True)
    assert [score == [0.0] for score in scores] == [answers] * 40 and pool.restarts == restarts


async def test_requests_cancelled_while_an_engine_is_replaced_are_not_sampled():
    class Slow(FakeEngine):
        async def start(self):
            await ready.wait()
            return 0.0

    ready, heir = asyncio.Event(), Slow()
    pool = await started(engine := succeeded_by(FakeEngine(dies_in=(0,)), lambda: heir))
    task = asyncio.create_task(pool.generate(ask("w")))
    await until(lambda: engine.calls and pool.restarts)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    ready.set()
    assert len(await pool.generate(ask("next"))) == 2
    assert [request.key for call in heir.calls for request in call] == ["next/0", "next/1"]


async def test_cancelled_request_is_aborted_in_the_engine():
    engine = FakeEngine(seconds=600)
    pool = await started(engine)
    task = asyncio.create_task(pool.generate(ask("w")))
    await until(lambda: engine.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.aborted)
    assert engine.aborted == ["w/0", "w/1"]


async def test_start_raises_the_engines_error():

    with pytest.raises(TrinityError):
        await started(FakeEngine(start_error=TrinityError("no such model")))


async def test_an_engine_with_long_answers_is_not_replaced():
    class Slow(FakeEngine):
        async def sampled(self):
            return time.monotonic_ns()

    pool = await started(Slow(seconds=0.3), patience=0.05)
    await pool.generate(ask("w"))
    assert pool.restarts == 0


async def test_a_new_engine_gets_the_version_loaded_meanwhile():
    """The others load a newer one while it starts."""
    begun = asyncio.Event()

    class Heir(FakeEngine):
        async def load(self, source, version):
            begun.set()
            await asyncio.sleep(0.05)
            return await super().load(source, version)

    heir, living = Heir(), FakeEngine(name="second")
    dying = succeeded_by(FakeEngine(dies_in=(0,)), lambda: heir)

    pool = await started(dying, living)
    await pool.load(SOURCE, 1)
    await asyncio.gather(*(pool.generate(ask(f"w{i}")) for i in range(2)))
    await begun.wait()
    await pool.load(SOURCE, 2)
    assert heir.version == living.version == 2


@pytest.mark.parametrize(("lives", "restarts"), [(2, 3), (9, 4)])
async def test_a_new_engine_that_dies_in_its_start_is_replaced_too(lives, restarts):
    """After three restarts the pool has a fault, which names the last loss."""

    class Weak(FakeEngine):
        born = 0

        async def start(self):
            Weak.born += 1
            if Weak.born <= lives:
                raise EngineLost("it died in its start")

        async def successor(self, model_path):
            return Weak(name="heir")

    dying = succeeded_by(FakeEngine(dies_in=(0,)), Weak)

    pool = await started(dying)
    if lives < 3:
        assert len(await pool.generate(ask("w"))) == 2
    else:
        for name in ("w", "again"):
            with pytest.raises(TransientFault):
                await pool.generate(ask(name))
    assert pool.restarts == restarts


@pytest.mark.parametrize(("held", "found"), [(1, 3), (4, 3)])
async def test_a_new_engine_gets_other_weights_if_its_own_are_gone(tmp_path, held, found):
    """Newer ones if the trainer has advanced, older ones if it has gone back; each token carries its version."""
    versions = open_versions("checkpoint", tmp_path)
    source = WeightSource("checkpoint", str(tmp_path))
    for version in (1, 2, 3):
        versions.publish(version, [("weight", torch.zeros(2))])

    class Heir(FakeEngine):
        async def load(self, source, version):
            if not open_versions(source.method, source.path).has(version):
                raise VersionGone(f"version {version} is gone")
            return await super().load(source, version)

    dying = succeeded_by(FakeEngine(dies_in=(0,)), Heir)

    pool = await started(dying)
    await pool.load(source, held)
    assert (await pool.generate(ask("w")))[0].versions.tolist() == [found] * 3


# ---- streaming ----


@dataclass
class GrowingEngine(FakeEngine):
    """Samples one token after another; lost after `dies_after` tokens."""

    dies_after: int = 99
    grown: dict[str, list[int]] = field(default_factory=dict)

    async def generate(self, requests) -> SampleBatch:
        self.calls.append(list(requests))
        for request in requests:
            sampled = self.grown[request.key] = []
            for token in self.answer[len(request.prompt) - 2 :][: request.sampling.max_tokens]:
                await asyncio.sleep(0.02)
                if len(sampled) == self.dies_after:
                    raise EngineLost("it is gone")
                sampled.append(token)
        return SampleBatch.pack([self.sample(self.grown[request.key]) for request in requests])

    def sample(self, tokens) -> Sample:
        count = len(tokens)
        ones = np.ones(count, np.float32)
        return Sample(np.array(tokens, np.int32), -ones, np.full(count, self.generation, np.int32), "stop")

    async def so_far(self, known):
        return {key: self.sample(self.grown[key][count:-1]) for key, count in known.items() if key in self.grown}

    async def successor(self, model_path: str) -> FakeEngine:
        self.heirs.append(GrowingEngine(self.answer, generation=self.generation + 1))
        return self.heirs[0]


async def parts_of(pool, limit=99):
    [request] = ask("streamed", 1)
    parts = []
    async for part, finished in pool.stream(replace(request, sampling=Sampling(max_tokens=limit))):
        parts.append((part.tokens.tolist(), part.versions.tolist(), finished))
    return parts


async def test_streamed_sample_arrives_in_parts():

    parts = await parts_of(await started(GrowingEngine([*range(10)])))
    assert [token for tokens, _, _ in parts for token in tokens] == [*range(10)]
    assert len(parts) > 2 and [finished for _, _, finished in parts] == [False] * (len(parts) - 1) + [True]


async def test_lost_engines_stream_continues_on_another_engine():
    engine = GrowingEngine([*range(10)], dies_after=6)

    parts = await parts_of(await started(engine), limit=20)
    assert [token for tokens, _, _ in parts for token in tokens] == [*range(10)]
    [[request]] = engine.heirs[0].calls
    handed = len(request.prompt) - 2
    assert 0 < handed < 6 and request.prompt.tolist() == [1, 2, *range(handed)]
    assert request.sampling.max_tokens == 20 - handed
    assert [version for _, versions, _ in parts for version in versions] == [0] * handed + [1] * (10 - handed)


@dataclass
class LateEngine(GrowingEngine):
    """Reports its samples `turns_late` turns of the event loop after it was lost."""

    turns_late: int = 0
    is_lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, requests) -> SampleBatch:
        try:
            return await super().generate(requests)
        finally:
            self.is_lost.set()

    async def so_far(self, known):
        await self.is_lost.wait()
        for _ in range(self.turns_late):
            await asyncio.sleep(0)
        return await super().so_far(known)


@pytest.mark.parametrize("turns_late", range(6))
async def test_lost_engine_adds_nothing_to_a_continued_stream(turns_late):
    """What is streamed is what is recorded: two engines rarely sample the same tokens."""
    lost = LateEngine([*range(10)], dies_after=6, turns_late=turns_late)
    other = GrowingEngine([*range(100, 110)], generation=1)

    parts = await parts_of(await started(lost, other))
    [[request]] = other.calls
    handed = len(request.prompt) - 2
    assert [token for tokens, _, _ in parts for token in tokens] == [*range(handed), *range(100 + handed, 110)]
    assert [version for _, versions, _ in parts for version in versions] == [0] * handed + [1] * (10 - handed)


async def test_closing_a_stream_gives_its_request_up():
    engine = GrowingEngine([*range(100)])
    pool = await started(engine)
    stream = pool.stream(ask("left", 1)[0].after(engine.sample([])))
    await anext(stream)
    await stream.aclose()
    await until(lambda: engine.aborted)
    assert engine.aborted == ["left/0"]


async def test_a_new_engine_that_hangs_is_replaced_too():
    """It starts before the watcher of the dead engine has checked again."""
    hanging = FakeEngine(hangs_in=(0,), name="heir")
    dying = succeeded_by(FakeEngine(dies_in=(0,)), lambda: hanging)
    pool = await started(dying, patience=0.2)
    samples, restarts = await asyncio.wait_for(pool.generate(ask("w")), 20), pool.restarts
    assert len(samples) == 2 and restarts == 2 and hanging.heirs[0].calls


async def test_too_many_lost_engines_raise_a_transient_fault():
    pool = await started(FakeEngine(dies_in=(0,)), max_restarts=0)
    for name in ("w", "again"):
        with pytest.raises(TransientFault):
            await pool.generate(ask(name))
    assert pool.restarts == 1
