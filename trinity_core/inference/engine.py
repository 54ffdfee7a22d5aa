"""Engine: one vLLM that generates for the explorer. A plain class; as a Ray actor it is an asynchronous one.

Any number of calls may be in flight. After every hand-over the engine proves what it holds: its log-probs of the
version's probe must agree with the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_core.inference.async_llm import AsyncLLMBackend
from trinity_core.inference.in_process import InProcessBackend
from trinity_core.inference.requests import Request, Sample, SampleBatch, WeightSource, WeightSyncReport
from trinity_core.inference.settings import EngineSettings
from trinity_core.layout import JobLayout, step_of
from trinity_core.sync.weight_check import TOLERANCES, WeightCheck, verify_weights
from trinity_core.tracking.logs import Logged, start_log

log = logging.getLogger(__name__)


class Engine:
    """One engine, in this process (CPU) or in vLLM's own (GPU).

    Raises `TrinityError` for what no retry can fix (a missing model, an invalid request), `WeightSyncError` if its
    weights are not the trainer's. After any other error the engine is unusable.
    """

    def __init__(self, settings: EngineSettings) -> None:
        start_log()
        self.settings = settings
        self._local = None if settings.on_gpu else InProcessBackend(settings)
        self._served = AsyncLLMBackend(settings) if settings.on_gpu else None
        self._starting: asyncio.Task[float] | None = None

    async def start(self) -> float:
        """Load the model; returns when it can generate, with the seconds that took. Starting again only waits."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        if self._starting.done():
            return self._starting.result()
        return await asyncio.shield(self._starting)

    async def _start(self) -> float:
        began = time.perf_counter()
        with Logged(f"the start of an engine with {self.settings.model_path}", log):
            if self._local is not None:
                await asyncio.wrap_future(self._local.start())
            else:
                await self._server.start()
        return time.perf_counter() - began

    async def describe(self) -> tuple[EngineSettings, float]:
        """Its settings, and its share of GPUs where it is a Ray actor."""
        import ray

        given = ray.get_runtime_context().get_assigned_resources() if ray.is_initialized() else {}
        return self.settings, float(given.get("GPU", 0.0))

    async def successor(self, model_path: str) -> Engine:
        """A new engine like this one, not started, to take its place in this process."""
        await self.stop()
        return Engine(replace(self.settings, model_path=model_path))

    @property
    def _server(self) -> AsyncLLMBackend:
        assert self._served is not None
        return self._served

    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        """Sample all requests; the batch is in their order."""
        samples: list[Sample]
        if self._local is not None:
            samples = await asyncio.wrap_future(self._local.generate(requests))
        else:
            samples = await self._server.generate(requests)
        return SampleBatch.pack(samples)

    async def abort(self, keys: Sequence[str]) -> None:
        """Give requests up."""
        if self._local is not None:
            self._local.abort(keys)
        else:
            await self._server.abort(keys)

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """Take `version` of the weights and prove it, where it has a probe.

        Requests in flight continue: each token records its version. Raises `WeightSyncError` if the check fails,
        `VersionGone` if the version no longer exists.
        """
        began = time.perf_counter()
        if self._local is not None:
            await asyncio.wrap_future(self._local.load(source, version))
        else:
            await self._server.load(source, version)
        probe = _probe(source, version)
        gap = None
        if probe is not None:
            coarser = max(probe.allowed, TOLERANCES[self.settings.compute_dtype])
            gap = verify_weights(probe, await self.score(probe.tokens), coarser)
        return WeightSyncReport(version, time.perf_counter() - began, gap)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1) of tokens 1 … of a sequence, each after those before it."""
        if self._local is not None:
            return await asyncio.wrap_future(self._local.score(tokens))
        return await self._server.score(tokens)

    async def version(self) -> int:
        """The version of the weights it holds."""
        return self._local.version if self._local is not None else self._server.version

    # ---- weights that the trainer pushes over NCCL; see `trinity_core.sync.nccl` ----

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Enter the trainer's NCCL group."""
        await self._server.join(init_info)

    async def start_weight_update(self) -> None:
        """Make ready to receive."""
        await self._server.begin_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive what the trainer sends now."""
        await self._server.update(update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put what was received in use as this version. It is proven when the explorer calls `load`."""
        await self._server.end_update(int(weight_version or 0))

    async def stop(self) -> None:
        """End the engine; what is in flight fails."""
        if self._local is not None:
            self._local.stop()
        else:
            self._server.stop()


def _probe(source: WeightSource, version: int) -> WeightCheck | None:
    """The proof that goes with the weights: of a converted checkpoint, if they were handed over from its folder too."""
    from trinity_core.sync.methods import open_versions

    if source.method != "folder":
        return open_versions(source.method, Path(source.path)).check(version)
    folder = Path(source.path).absolute()
    step, job_dir = step_of(folder.parent.parent), folder.parent.parent.parent
    if step is None or folder != JobLayout(job_dir).huggingface(step):
        return None
    record = open_versions("checkpoint", job_dir).record(step)
    return None if record is None else record.check
