"""How the explorer reaches an engine: directly in its own process, or as a Ray actor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.inference.requests import EngineLost

if TYPE_CHECKING:
    from trinity_core.inference.engine import Engine
    from trinity_core.inference.settings import EngineSettings

STOP_SECONDS = 10.0
"""For an engine to end vLLM in order, before its process is killed."""


class RemoteEngine:
    """An `Engine` that is a Ray actor: has its methods, which also raise `EngineLost` if it died or is unusable.

    Whoever places engines makes the actor.
    """

    def __init__(
        self, actor: Any, settings: EngineSettings | None = None, gpus: float = 0.0, log: dict[str, str] | None = None
    ) -> None:
        """`gpus`: those of the actor. Those of a first engine are known once it has started, as are settings and log,
        the environment by which its process finds its log."""
        self.actor, self.settings, self.gpus, self.log = actor, settings, gpus, log or {}

    async def start(self) -> float:
        """See `Engine.start`."""
        seconds: float = await self._call("start")
        self.settings, self.gpus, self.log = await self._call("describe")
        return seconds

    async def stop(self) -> None:
        """End the actor, vLLM's processes with it, also if it hangs."""
        import ray

        with suppress(EngineLost, TimeoutError):
            await asyncio.wait_for(self._call("stop"), STOP_SECONDS)
        ray.kill(self.actor)

    async def successor(self, model_path: str) -> RemoteEngine:
        """See `Engine.successor`: a new actor with the same share of GPUs, which lives as long as this process."""
        import ray

        from trinity_core.inference.engine import engine_class

        if self.settings is None:
            raise TransientFault("an engine died before it had started; see its log for the reason")
        await self.stop()
        if self.settings.weight_transfer:
            raise TransientFault("an engine was lost, and with it the NCCL group that brings the weights")
        settings = replace(self.settings, model_path=model_path)
        environment = settings.environment() | self.log | ({} if settings.on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
        options = {"num_cpus": 0, "num_gpus": self.gpus, "max_restarts": 0, "max_concurrency": 1000}
        actor_class = ray.remote(engine_class(settings)).options(runtime_env={"env_vars": environment}, **options)
        return RemoteEngine(actor_class.remote(settings), settings, self.gpus, self.log)

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        """The other methods of `Engine`."""
        if verb.startswith("_"):
            raise AttributeError(verb)
        return partial(self._call, verb)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self.actor, verb).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, TrinityError | TransientFault):
                raise error.cause from None
            raise EngineLost(f"it failed in {verb}: {error}") from error
        except RayError as error:
            raise EngineLost(f"it died: {str(error).splitlines()[0]}") from error


def as_handle(engine: Any) -> Engine:
    """Wrap the handle of a Ray actor; return an engine of this process as it is."""
    loaded = sys.modules.get("ray.actor")
    is_actor = loaded is not None and isinstance(engine, loaded.ActorHandle)
    return cast("Engine", RemoteEngine(engine) if is_actor else engine)
