"""How the explorer reaches an engine: directly in its own process, or as a Ray actor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.inference.requests import EngineLost, Request, Sample, SampleBatch, WeightSource, WeightSyncReport

if TYPE_CHECKING:
    from trinity_core.inference.settings import EngineSettings

STOP_SECONDS = 10.0
"""For an engine to end vLLM in order, before its process is killed."""


class EngineHandle(Protocol):
    """The verbs of `Engine` that the pool calls. They raise `EngineLost` if the engine died or is unusable."""

    async def start(self) -> float: ...
    async def generate(self, requests: Sequence[Request]) -> SampleBatch: ...
    async def so_far(self, known: Mapping[str, int]) -> dict[str, Sample]: ...
    async def abort(self, keys: Sequence[str]) -> None: ...
    async def load(self, source: WeightSource, version: int) -> WeightSyncReport: ...
    async def reset_prefix_cache(self) -> None: ...
    async def sampled(self) -> int: ...
    async def score(self, tokens: Sequence[int]) -> list[float]: ...
    async def stop(self) -> None: ...
    async def successor(self, model_path: str) -> EngineHandle:
        """Stop this engine; return a new one with the same settings, not started."""
        ...


@dataclass
class RemoteEngine:
    """The handle of an engine that is a Ray actor. Whoever places engines makes the actor."""

    actor: Any
    settings: EngineSettings | None = None
    gpus: float = 0.0
    """GPUs of the actor. Those of a first engine are known once it has started, as are settings and log."""
    log: dict[str, str] = field(default_factory=dict)
    """The environment by which its process finds its log."""

    async def start(self) -> float:
        """See `Engine.start`."""
        seconds = await self._call("start")
        self.settings, self.gpus, self.log = await self._call("describe")
        return seconds

    async def generate(self, requests: Sequence[Request]) -> SampleBatch:
        """See `Engine.generate`."""
        return await self._call("generate", requests)

    async def so_far(self, known: Mapping[str, int]) -> dict[str, Sample]:
        """See `Engine.so_far`."""
        return await self._call("so_far", known)

    async def abort(self, keys: Sequence[str]) -> None:
        """See `Engine.abort`."""
        await self._call("abort", keys)

    async def load(self, source: WeightSource, version: int) -> WeightSyncReport:
        """See `Engine.load`."""
        return await self._call("load", source, version)

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        await self._call("reset_prefix_cache")

    async def sampled(self) -> int:
        """See `Engine.sampled`."""
        return await self._call("sampled")

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """See `Engine.score`."""
        return await self._call("score", tokens)

    async def stop(self) -> None:
        """End the actor, vLLM's processes with it, also if it hangs."""
        import ray

        with suppress(EngineLost, TimeoutError):
            await asyncio.wait_for(self._call("stop"), STOP_SECONDS)
        ray.kill(self.actor)

    async def successor(self, model_path: str) -> RemoteEngine:
        """See `Engine.successor`: a new actor with the same share of GPUs, which lives as long as this process."""
        import ray

        from trinity_core.inference.engine import Engine

        if self.settings is None:
            raise TransientFault("an engine died before it had started; see its log for the reason")
        await self.stop()
        if self.settings.weight_transfer:
            raise TransientFault("an engine was lost, and with it the NCCL group that brings the weights")
        settings = replace(self.settings, model_path=model_path)
        environment = settings.environment() | self.log | ({} if settings.on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
        options = {"num_cpus": 0, "num_gpus": self.gpus, "max_restarts": 0, "max_concurrency": 1000}
        made = ray.remote(Engine).options(runtime_env={"env_vars": environment}, **options).remote(settings)
        return RemoteEngine(made, settings, self.gpus, self.log)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        method = {
            "start": self.actor.start,
            "describe": self.actor.describe,
            "generate": self.actor.generate,
            "so_far": self.actor.so_far,
            "abort": self.actor.abort,
            "load": self.actor.load,
            "reset_prefix_cache": self.actor.reset_prefix_cache,
            "sampled": self.actor.sampled,
            "score": self.actor.score,
            "stop": self.actor.stop,
        }[verb]
        try:
            return await method.remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, TrinityError | TransientFault):
                raise error.cause from None
            raise EngineLost(f"it failed in {verb}: {error}") from error
        except RayError as error:
            raise EngineLost(f"it died: {str(error).splitlines()[0]}") from error


def as_handle(engine: Any) -> EngineHandle:
    """Wrap the handle of a Ray actor; return an engine of this process as it is."""
    loaded = sys.modules.get("ray.actor")
    return RemoteEngine(engine) if loaded is not None and isinstance(engine, loaded.ActorHandle) else engine
