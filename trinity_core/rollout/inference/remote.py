"""Access to an engine: directly in this process, or as a Ray actor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.waits import poll_async
from trinity_core.rollout.inference.requests import EngineLost

if TYPE_CHECKING:
    from trinity_core.rollout.inference.engine import Engine
    from trinity_core.rollout.inference.settings import EngineSettings

STOP_SECONDS = 10.0
"""Time for an engine to end vLLM cleanly, before its process is killed."""
NAME_SECONDS = 60.0
"""Time for Ray to notice that a killed actor is dead, which frees its name."""


def engine_class(settings: EngineSettings) -> type[Engine]:
    from trinity_core.rollout.inference.async_llm import AsyncLLMEngine
    from trinity_core.rollout.inference.in_process import InProcessEngine

    return AsyncLLMEngine if settings.on_gpu else InProcessEngine


class RemoteEngine:
    """An `Engine` that is a Ray actor. Its methods also raise `EngineLost` if it died or is unusable.

    The code that places engines creates the actor.
    """

    def __init__(
        self, actor: Any, settings: EngineSettings | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """`options`: the actor's `present_options`. Those of a first engine, and its settings, are read once it has
        started."""
        self.actor, self.settings, self.options = actor, settings, options or {}

    async def start(self) -> float:
        seconds: float = await self._call("start")
        self.settings, self.options = await self._call("describe")
        return seconds

    async def stop(self) -> None:
        """End the actor and vLLM's processes, even if it hangs."""
        import ray

        with suppress(EngineLost, TimeoutError):
            await asyncio.wait_for(self._call("stop"), STOP_SECONDS)
        ray.kill(self.actor)

    async def successor(self, model_path: str) -> RemoteEngine:
        """See `Engine.successor`: a new actor in place of this one, which lives as long as this process.

        Raises `EngineLost` if the old one does not end in time.
        """
        import ray
        from ray.exceptions import ActorAlreadyExistsError

        if self.settings is None:
            raise TransientFault("an engine died before it had started; see its log for the reason")
        await self.stop()
        if self.settings.weight_transfer:
            raise TransientFault("an engine was lost, and with it the NCCL group that brings the weights")
        settings = replace(self.settings, model_path=model_path)
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 100_000, **self.options}
        actor_class = ray.remote(engine_class(settings)).options(**options)
        async for _ in poll_async(NAME_SECONDS, pause=0.1):
            with suppress(ActorAlreadyExistsError):
                return RemoteEngine(actor_class.remote(settings), settings, self.options)
        raise EngineLost(f"{self.options['name']} has been killed, but has not ended within {NAME_SECONDS:g} s")

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        if verb.startswith("_"):
            raise AttributeError(verb)
        return partial(self._call, verb)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        return await answer("it", self.actor, verb, *arguments)


async def answer(who: str, actor: Any, verb: str, *arguments: Any) -> Any:
    """Return a Ray actor's answer. Raises its TrinityError or TransientFault, and `EngineLost` for everything else."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await getattr(actor, verb).remote(*arguments)
    except RayTaskError as error:
        if isinstance(error.cause, TrinityError | TransientFault):
            raise error.cause from None
        raise EngineLost(f"{who} failed in {verb}: {error}") from error
    except RayError as error:
        raise EngineLost(f"{who} died: {str(error).splitlines()[0]}") from error


def as_handle(engine: Any) -> Engine:
    """Wrap the handle of a Ray actor; return an engine of this process unchanged."""
    loaded = sys.modules.get("ray.actor")
    is_actor = loaded is not None and isinstance(engine, loaded.ActorHandle)
    return cast("Engine", RemoteEngine(engine) if is_actor else engine)
