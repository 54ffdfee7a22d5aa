"""The single-agent environments of verifiers 0.4: `configs/environments/verifiers_env.py:Verifiers`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from contextlib import AsyncExitStack
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.session import call_hook
from verifiers.v1.types import content_text
from verifiers.v1.utils.decorators import discover_decorated

Told = tuple[str, float, bool, dict[str, Any]]
PLAYED: ContextVar[Verifiers] = ContextVar("PLAYED")
ENDLESS = 1000
"""Tasks used of a task set that never ends."""
TOKENS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Verifiers:
    """`env_id`: an installed package, or a file. `env_config`: settings, as in the `[env]` block of verifiers' TOML.

    The seed is the task's place in the task set, modulo its length. The reward comes with the end of an episode.
    Tools, whose servers run during the episode, are called as `<tool_call>{"name": …, "arguments": …}</tool_call>`.
    """

    def __init__(self, env_id: str, env_config: dict[str, Any] | None = None) -> None:
        if env_id.endswith(".py"):
            folder = str(Path(env_id).resolve().parent)
            sys.path.append(folder)
            os.environ["PYTHONPATH"] = folder  # of the servers of its tools
        options = env_config or {}
        taskset = {**options.get("taskset", {}), "id": Path(env_id).stem if env_id.endswith(".py") else env_id}
        config = vf.resolve_env_config({**options, "taskset": taskset})
        seat = {"harness": vf.HarnessConfig(id="trinity_policy"), "runtime": vf.SubprocessConfig()}
        agents = {name: agent.model_copy(update=seat) for name, agent in config if isinstance(agent, vf.AgentConfig)}
        self.env = vf.load_environment(config.model_copy(update=agents))
        self.tasks = self.env.taskset if self.env.taskset.INFINITE else list(self.env.taskset)
        self.serving: asyncio.Task[None] | None = None
        self.playing: asyncio.Task[Told] | None = None
        if len(agents) != 1:
            raise ValueError(f"{env_id} has the agents {', '.join(agents)}: only one can be played")
        limits = [f"{name}.{limit}" for name, agent in agents.items() for limit in TOKENS if getattr(agent, limit)]
        if limits:
            raise ValueError(
                f"{env_id} has {', '.join(limits)}, but actions are text: use max_response_tokens, max_turns"
            )
        if not self.tasks:
            raise ValueError(f"{env_id} has no tasks")

    async def reset(self, seed: int) -> Told:
        await ended(self.playing)
        if self.serving is None:
            ready = asyncio.get_running_loop().create_future()
            self.serving = asyncio.create_task(self._serve(ready))
            await asyncio.wait([ready, self.serving], return_when=asyncio.FIRST_COMPLETED)
        if self.serving.done():
            self.serving.result()
        place = seed % (ENDLESS if self.env.taskset.INFINITE else len(self.tasks))
        self.task = next(islice(self.tasks, place, None))
        if discover_decorated(self.task, "intercept"):
            raise ValueError(f"{type(self.task).__name__} intercepts calls of the model, and there are none")
        self.asked, self.actions = asyncio.Queue[Told](), asyncio.Queue[str]()
        self.offered: list[dict[str, Any]] = []
        self.playing = asyncio.create_task(self._play())
        return await self._next()

    async def step(self, action: str) -> Told:
        self.actions.put_nowait(action)
        return await self._next()

    def tools(self) -> list[dict[str, Any]]:
        return self.offered

    async def close(self) -> None:
        await ended(self.playing)
        await ended(self.serving)

    async def _next(self) -> Told:
        asked = asyncio.create_task(self.asked.get())
        await asyncio.wait([asked, self.playing], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return self.playing.result()

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold the servers that episodes share, such as those of tools, until this environment closes."""
        async with self.env.serving():
            ready.set_result(None)
            await asyncio.Event().wait()

    async def _play(self) -> Told:
        PLAYED.set(self)
        episode = await self.env.run_episode(self.task, vf.ModelContext("policy", vf.EvalClientConfig()))
        for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            raise RuntimeError(f"{error.type}: {error.message}")
        rewards = [trace.reward for trace in episode.traces if trace.rewards]
        return "", sum(rewards), True, {} if rewards else {"rewarded": False}


class Policy(vf.Harness[vf.HarnessConfig]):
    """Where verifiers would call the model, shows what is new and waits for the next action."""

    SUPPORTS_RESUME = SUPPORTS_MCP = APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        played, done, invalid = PLAYED.get(), vf.ProgramResult(0, "", ""), False
        system, prompt = self.resolve_prompt(data)  # the prompt is the conversation so far
        messages = [vf.SystemMessage(content=system)] if system else []
        messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        async with AsyncExitStack() as stack:
            config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            played.offered, known, servers = await connect_mcp(config, stack)
            tools = [vf.Tool(**tool["function"]) for tool in played.offered]
            while not await stopped(played.task, trace):
                new = "\n\n".join(content_text(message.content) for message in messages[len(trace.messages) :])
                played.asked.put_nowait((new, 0.0, False, {"invalid": True} if invalid else {}))
                text = await played.actions.get()
                calls = [tool_call(f"{trace.num_turns}-{i}", call) for i, call in enumerate(CALL.findall(text))]
                said = vf.AssistantMessage(content=CALL.sub("", text).strip() or None, tool_calls=calls or None)
                reason = "tool_calls" if calls else "stop"
                answer = vf.Response(id="", created=0, model="policy", message=said, finish_reason=reason)
                prepare_turn(trace, messages, tools).commit(answer)
                if not calls:
                    break
                messages.append(said)
                for call in calls:
                    result = f"error: unknown tool {call.name!r}"
                    if call.name in known:
                        result = await call_mcp(servers, known, call.name, json.loads(call.arguments))
                    messages.append(vf.ToolMessage(tool_call_id=call.id, content=result, name=call.name))
                invalid = any(call.name not in known for call in calls)
        return done


async def ended(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task, and wait until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


async def stopped(task: Any, trace: Any) -> bool:
    """True where verifiers refuses a further turn: at the agent's `max_turns`, or by an `@vf.stop`."""
    most = trace.agent.config.max_turns
    if most is not None and trace.num_turns >= most:
        trace.stop("max_turns")
        return True
    for stop in task.hooks("stop"):
        if await call_hook(stop, {vf.Trace: trace}):
            trace.stop(stop.__name__)
            return True
    return False


def tool_call(name: str, text: str) -> vf.ToolCall:
    """A call that the policy wrote; one that cannot be read calls a tool without a name."""
    try:
        request = json.loads(text)
        tool, arguments = str(request["name"]), dict(request.get("arguments", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        tool, arguments = "", {}
    return vf.ToolCall(id=name, name=tool, arguments=json.dumps(arguments))


sys.modules["trinity_policy"] = ModuleType("trinity_policy")  # where verifiers looks for a harness of this id
vars(sys.modules["trinity_policy"]).update(Policy=Policy, __all__=["Policy"])
