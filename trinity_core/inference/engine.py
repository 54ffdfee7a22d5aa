"""Engine: one vLLM that generates for the explorer. A plain class; as a Ray actor it is an asynchronous one.

Any number of calls may be in flight. After every load the engine shows that it holds the version: its parameters must
be made of the published tensors, and its log-probs of the weight check's tokens must agree with the trainer's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity_core.errors import InputError, TrinityError
from trinity_core.inference.async_llm import AsyncLLMBackend
from trinity_core.inference.backend import Backend, WeightTransfer
from trinity_core.inference.in_process import InProcessBackend
from trinity_core.inference.requests import Request, Sample, SampleBatch, WeightSource, WeightSyncReport
from trinity_core.inference.settings import EngineSettings
from trinity_core.inference.weight_receiver import EMBEDDINGS, HEAD
from trinity_core.layout import JobLayout, step_of
from trinity_core.sync.parameter_check import RankDigests, verify_parameters
from trinity_core.sync.versions import WeightVersions
from trinity_core.sync.weight_check import TOLERANCES, verify_weights
from trinity_core.tracking.logs import Logged, present_log_environment, start_log

log = logging.getLogger(__name__)


class Engine:
    """One engine on a backend: vLLM in this process on the CPU, in processes of its own on a GPU.

    Raises `TrinityError` for what no retry can fix (a missing model, an invalid request), `WeightSyncError` if its
    weights are not the trainer's. After any other error the engine is unusable.
    """

    def __init__(self, settings: EngineSettings) -> None:
        start_log()
        self.settings = settings
        self._backend: Backend = AsyncLLMBackend(settings) if settings.on_gpu else InProcessBackend(settings)
        self._starting: asyncio.Task[float] | None = None
        self._held: tuple[int, RankDigests] = (0, ())
        """The version that was checked last, and the digests of the parameters then."""

    async def start(self) -> float:
        """Load the model; returns the seconds that took when it can generate. A second call waits for the first."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        if self._starting.done():
            return self._starting.result()
        return await asyncio.shield(self._starting)

    async def _start(self) -> float:
        began = time.perf_counter()
        with Logged(f"the start of an engine with {self.settings.model_path}", log):
            await self._backend.start()
        return time.perf_counter() - began

    async def describe(self) -> tuple[EngineSettings, float, dict[str, str]]:
        """Its settings, its share of GPUs if it is a Ray actor, and the environment of its log."""
        import ray

        given = ray.get_runtime_context().get_assigned_resources() if ray.is_initialized() else {}
        return self.settings, float(given.get("GPU", 0.0)), present_log_environment()

    async def successor(self, model_path: str) -> Engine:
        """Stop this engine; return a new one with the same settings, not started."""
        await self.stop()
        return Engine(replace(self.settings, model_path=model_path))

    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        """Sample all requests; the batch is in their order."""
        return SampleBatch.pack(await self._backend.generate(requests))

    async def so_far(self, known: Mapping[str, int]) -> dict[str, Sample]:
        """By key, what was sampled for the requests that are in flight after the tokens that are `known`, but for the
        newest token of each."""
        samples = zip(known, self._backend.so_far(known), strict=True)
        return {key: sample for key, sample in samples if sample is not None}

    async def abort(self, keys: Sequence[str]) -> None:
        """Give requests up."""
        await self._backend.abort(keys)

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """Load `version` of the weights and check that the engine holds it.

        Requests in flight continue: each token records its version. Raises `WeightSyncError` if what arrived, a
        parameter or a log-prob is not the trainer's, `VersionGone` if the version no longer exists.
        """
        began = time.perf_counter()
        await self._backend.load(source, version)
        loaded = time.perf_counter()
        published = _published(source, version)
        gap = None if published is None else await self._check(*published)
        ended = time.perf_counter()
        return WeightSyncReport(version, ended - began, gap, ended - loaded)

    async def _check(self, versions: WeightVersions, version: int) -> float | None:
        """The parameter check, and the gap of the weight check if `version` has one."""
        if values := await asyncio.to_thread(versions.values, version, self.settings.compute_dtype):
            ranks = await self._backend.parameter_digests()
            if EMBEDDINGS in values:
                values.setdefault(HEAD, values[EMBEDDINGS])
            held, before = self._held
            verify_parameters(version, values, ranks, before, held)
            self._held = (version, ranks)
        if (check := versions.check(version)) is None:
            return None
        tolerance = max(check.allowed, TOLERANCES[self.settings.compute_dtype])
        return verify_weights(check, await self.score(check.tokens), tolerance)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, so that the next prompts are computed as by an engine that has just started."""
        await self._backend.reset_prefix_cache()

    async def sampled(self) -> int:
        """A number that grows with every token sampled: a sign of life."""
        return self._backend.sampled()

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs (temperature 1, nats) of tokens 1 … of a sequence, each after the tokens before it.

        Raises `InputError` for a sequence that leaves no room for the token that vLLM samples after it.
        """
        most = self.settings.max_model_len - 1
        if len(tokens) > most:
            raise InputError(f"a sequence of {len(tokens)} tokens cannot be scored: max_model_len allows {most}")
        return await self._backend.score(tokens)

    async def version(self) -> int:
        """The version of the weights in use."""
        return self._backend.version

    # ---- weights that the trainer pushes; see `trinity_core.sync.nccl_transfer` ----

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Enter the trainer's NCCL group."""
        await self._transfer.join(init_info)

    async def start_weight_update(self) -> None:
        """Pause generation and make ready to receive."""
        await self._transfer.begin_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive what the trainer sends now."""
        await self._transfer.update(update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put the received weights in use as this version. The weight check follows when the explorer calls `load`."""
        await self._transfer.end_update(int(weight_version or 0))

    @property
    def _transfer(self) -> WeightTransfer:
        if not isinstance(self._backend, WeightTransfer):
            raise TrinityError("weights cannot be pushed to an engine on the CPU; set synchronizer.sync_method: memory")
        return self._backend

    async def stop(self) -> None:
        """End the engine; requests in flight fail."""
        await self._backend.stop()


def _published(source: WeightSource, version: int) -> tuple[WeightVersions, int] | None:
    """The versions and the number under which `source` was published; of a converted checkpoint, those of its step.

    None for a folder of other origin, or if its version is gone.
    """
    from trinity_core.sync.methods import open_versions

    if source.method != "folder":
        return open_versions(source.method, Path(source.path)), version
    folder = Path(source.path).absolute()
    step, job_dir = step_of(folder.parent.parent), folder.parent.parent.parent
    if step is None or folder != JobLayout(job_dir).huggingface(step):
        return None
    versions = open_versions("checkpoint", job_dir)
    return (versions, step) if versions.has(step) else None
