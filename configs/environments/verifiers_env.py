"""The environments of Prime Intellect's verifiers 0.4 for one agent without tools:
`configs/environments/verifiers_env.py:Verifiers`."""

from __future__ import annotations

import asyncio
import sys
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import prepare_turn
from verifiers.v1.session import call_hook
from verifiers.v1.types import content_text
from verifiers.v1.utils.decorators import discover_decorated

Told = tuple[str, float, bool, dict[str, Any]]
PLAYED: ContextVar[Verifiers] = ContextVar("PLAYED")
ENDLESS = 1000
"""Tasks used of a task set that never ends."""


class Verifiers:
    """`env_id`: an installed package, or a file. `env_config`: settings, as in the `[env]` block of verifiers' TOML.

    The seed is the task's place in the task set, modulo its length. The reward comes with the end of an episode.
    """

    def __init__(self, env_id: str, env_config: dict[str, Any] | None = None) -> None:
        sys.path.extend([str(Path(env_id).resolve().parent)] if env_id.endswith(".py") else [])
        options = env_config or {}
        taskset = {**options.get("taskset", {}), "id": Path(env_id).stem if env_id.endswith(".py") else env_id}
        config = vf.resolve_env_config({**options, "taskset": taskset})
        seat = {"harness": vf.HarnessConfig(id="trinity_policy"), "runtime": vf.SubprocessConfig()}
        agents = {name: agent.model_copy(update=seat) for name, agent in config if isinstance(agent, vf.AgentConfig)}
        self.env = vf.load_environment(config.model_copy(update=agents))
        self.tasks = self.env.taskset if self.env.taskset.INFINITE else list(self.env.taskset)
        self.playing: asyncio.Task[Told] | None = None
        if len(agents) != 1:
            raise ValueError(f"{env_id} has the agents {', '.join(agents)}: only one can be played")
        if not self.tasks:
            raise ValueError(f"{env_id} has no tasks")

    async def reset(self, seed: int) -> Told:
        await self.close()
        place = seed % (ENDLESS if self.env.taskset.INFINITE else len(self.tasks))
        self.task = next(islice(self.tasks, place, None))
        if discover_decorated(self.task, "intercept"):
            raise ValueError(f"{type(self.task).__name__} intercepts calls of the model, and there are none")
        self.asked, self.actions = asyncio.Queue[str](), asyncio.Queue[str]()
        self.playing = asyncio.create_task(self._play())
        return await self._next()

    async def step(self, action: str) -> Told:
        self.actions.put_nowait(action)
        return await self._next()

    def tools(self) -> list[Any]:
        return []

    async def close(self) -> None:
        if self.playing is not None:
            self.playing.cancel()
            await asyncio.wait([self.playing])

    async def _next(self) -> Told:
        asked = asyncio.create_task(self.asked.get())
        await asyncio.wait([asked, self.playing], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result(), 0.0, False, {}
        asked.cancel()
        return self.playing.result()

    async def _play(self) -> Told:
        PLAYED.set(self)
        async with self.env.serving():
            episode = await self.env.run_episode(self.task, vf.ModelContext("policy", vf.EvalClientConfig()))
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            raise RuntimeError(f"{error.type}: {error.message}")
        rewards = [trace.reward for trace in episode.traces if trace.rewards]
        return "", sum(rewards), True, {} if rewards else {"rewarded": False}


class Policy(vf.Harness[vf.HarnessConfig]):
    """Where verifiers would call the model, shows what is new and waits for the next action."""

    SUPPORTS_RESUME = APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, *rest: Any) -> vf.ProgramResult:
        played, done = PLAYED.get(), vf.ProgramResult(0, "", "")
        system, prompt = self.resolve_prompt(rest[-1])  # the task, its prompt being the conversation so far
        messages = [vf.SystemMessage(content=system)] if system else []
        messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        for stop in played.task.hooks("stop"):
            if await call_hook(stop, {vf.Trace: trace}):
                trace.stop(stop.__name__)
                return done
        new = messages[len(trace.messages) :]
        played.asked.put_nowait("\n\n".join(content_text(message.content) for message in new))
        said = vf.AssistantMessage(content=await played.actions.get())
        answer = vf.Response(id="", created=0, model="policy", message=said, finish_reason="stop")
        prepare_turn(trace, messages).commit(answer)
        return done


sys.modules["trinity_policy"] = ModuleType("trinity_policy")  # where verifiers looks for a harness of this id
vars(sys.modules["trinity_policy"]).update(Policy=Policy, __all__=["Policy"])
