"""An engine without a model, for tests of the code around it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from trinity_core.rollout.inference.requests import EngineLost, Sample, SampleBatch, WeightSyncReport
from trinity_core.rollout.inference.settings import EngineSettings


@dataclass
class FakeEngine:
    """Answers each request with `answer` at once, and records its calls."""

    answer: list[int] = field(default_factory=lambda: [1, 2, 3])
    logprob: float = -0.5
    settings: EngineSettings = field(default_factory=lambda: EngineSettings("model", 100))
    name: str = "first"
    generation: int = 0
    dies_in: tuple[int, ...] = ()
    """The calls of `generate` (from 0) in which it is lost."""
    hangs_in: tuple[int, ...] = ()
    """The calls that never return."""
    start_error: Exception | None = None
    seconds: float = 0.0
    calls: list[list] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    loaded: list[tuple] = field(default_factory=list)
    cache_resets: list[int] = field(default_factory=list)
    """The number of `generate` calls before each `reset_prefix_cache`."""
    version: int = 0
    stopped: bool = False
    turns: list[str] = field(default_factory=list)
    """`wake`, `sleep` and `generate`, in order."""
    heirs: list[FakeEngine] = field(default_factory=list)

    async def start(self) -> float:
        if self.start_error:
            raise self.start_error
        return 0.0

    async def generate(self, requests) -> SampleBatch:
        number = len(self.calls)
        self.turns.append("generate")
        self.calls.append(list(requests))
        await asyncio.sleep(self.seconds)
        if number in self.hangs_in:
            await asyncio.Event().wait()
        if number in self.dies_in:
            raise EngineLost(f"{self.name} is gone")
        return SampleBatch.pack([self._sample(request) for request in requests])

    def _sample(self, request) -> Sample:
        tokens = np.array(self.answer[: request.sampling.max_tokens], dtype=np.int32)
        length = len(tokens)
        reason = "stop" if length == len(self.answer) else "length"
        return Sample(
            tokens, np.full(length, self.logprob, np.float32), np.full(length, self.version, np.int32), reason
        )

    async def abort(self, keys) -> None:
        self.aborted += keys

    async def load(self, source, version) -> WeightSyncReport:
        self.loaded.append((source, version))
        self.version = version
        return WeightSyncReport(version, 0.01, 1e-6)

    async def wake(self) -> None:
        self.turns.append("wake")

    async def sleep(self) -> None:
        self.turns.append("sleep")

    async def reset_prefix_cache(self) -> None:
        self.cache_resets.append(len(self.calls))

    async def sampled(self) -> int:
        return len(self.calls)

    async def stop(self) -> None:
        self.stopped = True

    async def successor(self, model_path: str) -> FakeEngine:
        await self.stop()
        heir = FakeEngine(
            self.answer, settings=self.settings, name=f"{self.name}'s heir", generation=self.generation + 1
        )
        self.heirs.append(heir)
        return heir
