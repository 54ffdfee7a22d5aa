"""Environments over HTTP: a server of OpenEnv's protocol, one WebSocket session for each rollout.

Actions are texts (`OpenEnv`) or, with its `MCPEnvironment`, calls of tools (`OpenEnvTools`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trinity_core.base.errors import InputError
from trinity_core.base.lazy import aiohttp
from trinity_core.base.waits import poll_async
from trinity_core.data.formats import Tool
from trinity_core.workflows.environments.protocol import ENVIRONMENTS, EnvironmentFailed, Step

START_SECONDS = 32.0
"""Time for a full or starting server to open a session; less than the default `time_limit`."""
MOST_BYTES = 16 << 20
CLOSE_SECONDS = 2.0
"""Time for a server to end a session that its client has closed."""


@ENVIRONMENTS.register("openenv")
class OpenEnv:
    """A session of an OpenEnv server, such as a Space of the hub or a container.

    The policy's text becomes the action's field `action_key`; without a key, the text must be the action as a JSON
    object, or the action is invalid. The policy sees the observation's field `observation_key`, or without a key the
    observation as JSON.
    """

    def __init__(
        self,
        url: str,
        action_key: str | None = "message",
        observation_key: str | None = None,
        reset_args: dict[str, Any] | None = None,
        send_seed: bool = True,
    ) -> None:
        """`url`: `http://host:port`. `reset_args`: further data of the reset; `send_seed`: include the seed in it."""
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise InputError(f"the url of an OpenEnv server is http://host:port, not '{url}'", key="url")
        self._url = f"{'wss' if scheme in ('https', 'wss') else 'ws'}://{rest.rstrip('/')}/ws"
        self._action_key, self._observation_key = action_key, observation_key
        self._reset_args, self._send_seed = reset_args or {}, send_seed
        self._channel: Channel | None = None
        self._shown = ""

    async def reset(self, seed: int) -> Step:
        """Begin a new episode; the first call opens the session."""
        data = {**({"seed": seed} if self._send_seed else {}), **self._reset_args}
        return await self._observed_with_retries({"type": "reset", "data": data})

    async def step(self, action: str) -> Step:
        data: Any = {self._action_key: action} if self._action_key else _as_object(action)
        if data is None:
            return Step(
                f"Say a JSON object.\n{self._shown}", info={"invalid": True, "rewarded": False, "state": self._shown}
            )
        ask = self._observed_with_retries if self._channel is None else self._observed
        return await ask({"type": "step", "data": data})

    async def tools(self) -> list[Any]:
        """Return no tools."""
        return []

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _observed_with_retries(self, message: Mapping[str, Any]) -> Step:
        """Like `_observed`, with retries for a server that is full or starting."""
        async for _ in poll_async(START_SECONDS, pause=1.0):
            try:
                return await self._observed(message)
            except _NotNow as error:
                refusal = error
                await self.close()
        raise refusal

    async def _observed(self, message: Mapping[str, Any]) -> Step:
        """Return the server's answer. Raises EnvironmentFailed if it cannot be reached, refuses or is malformed."""
        try:
            if self._channel is None:
                self._channel = await Channel.opened(self._url)
            reply = await self._channel.ask(json.dumps(message))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _NotNow(f"OpenEnv server {self._url}: {error}") from error
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFailed(f"OpenEnv server {self._url} ended the session ({reply.type.name})")
        try:
            answer = json.loads(reply.data)
        except (ValueError, RecursionError):
            raise EnvironmentFailed(
                f"OpenEnv server {self._url} said {reply.data[:200]!r}, which is not JSON"
            ) from None
        return self._step(message["type"], answer)

    def _step(self, request: str, answer: Any) -> Step:
        match answer:
            case {
                "type": "observation",
                "data": {"observation": seen, "reward": None | int() | float() as reward, "done": bool(done)},
            }:
                self._shown = self._text(seen)
                info = {"state": self._shown, "rewarded": reward is not None}
                return Step(self._shown, float(reward or 0.0), done, info)
            case {"type": "error", "data": {"code": "VALIDATION_ERROR"} as data} if request == "step":
                text = f"That is no action. {_reasons(data)}\n{self._shown}".strip()
                return Step(text, info={"invalid": True, "rewarded": False, "state": self._shown})
            case {"type": "error", "data": {"code": "CAPACITY_REACHED"} as data}:
                raise _NotNow(f"OpenEnv server {self._url} is full: {data.get('message')}")
            case {"type": "error", "data": data}:
                raise EnvironmentFailed(f"OpenEnv server {self._url} refuses a {request}: {str(data)[:300]}")
        raise EnvironmentFailed(f"OpenEnv server {self._url} said {str(answer)[:200]!r}")

    def _text(self, seen: Any) -> str:
        if self._observation_key is None:
            return json.dumps(seen, ensure_ascii=False)
        if not isinstance(seen, dict) or self._observation_key not in seen:
            raise EnvironmentFailed(f"the observation {str(seen)[:200]} has no '{self._observation_key}'")
        value = seen[self._observation_key]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Channel:
    """A WebSocket that always awaits the next message: only then does aiohttp answer pings, by which a server detects a
    lost client while the policy generates."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._session, self._socket = session, socket
        self._next = asyncio.ensure_future(socket.receive())

    @classmethod
    async def opened(cls, url: str) -> Channel:
        session = aiohttp.ClientSession()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(session.close)
            channel = cls(session, await session.ws_connect(url, max_msg_size=MOST_BYTES))
            on_failure.pop_all()
            return channel

    async def ask(self, text: str) -> aiohttp.WSMessage:
        """Send `text` and return the next message. Raises ConnectionError if the channel is closed."""
        await self._socket.send_str(text)
        reply = await self._next
        self._next = asyncio.ensure_future(self._socket.receive())
        return reply

    async def close(self) -> None:
        """Tell the server to end the session, and close the connection after `CLOSE_SECONDS` at the latest."""
        if not self._next.done():
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await self._socket.send_str(json.dumps({"type": "close"}))
                await asyncio.wait([self._next], timeout=CLOSE_SECONDS)
        self._next.cancel()
        await asyncio.wait([self._next])
        await self._socket.close()
        await self._session.close()


class _NotNow(EnvironmentFailed):
    """The server is full or unreachable; a later attempt may succeed."""


def _as_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reasons(data: Mapping[str, Any]) -> str:
    """Return the reasons for a refused action, for the policy."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return str(data.get("message", ""))
    return "; ".join(
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors if isinstance(error, dict)
    )


CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
NO_ACTION = ("tool_not_found", "invalid_args")
"""Errors for wrong calls by the policy; with others the tool itself failed."""


@ENVIRONMENTS.register("openenv_tools")
class OpenEnvTools:
    """A session of an OpenEnv server that offers tools over MCP.

    Its tools are those of the conversation. The policy calls them as `<tool_call>{"name": …, "arguments":
    …}</tool_call>`, several in a turn if it likes, or its whole text is one such object. It sees their results.
    """

    def __init__(self, url: str, reset_args: dict[str, Any] | None = None, send_seed: bool = True) -> None:
        """See `OpenEnv`."""
        self._world = OpenEnv(url, action_key=None, reset_args=reset_args, send_seed=send_seed)
        self._url = url
        self._shown = ""

    async def tools(self) -> list[Tool]:
        """Return the server's tools. Raises EnvironmentFailed if there are none."""
        answer = await self._world.step(json.dumps({"type": "list_tools"}))
        match {} if answer.info.get("invalid") else json.loads(answer.observation):
            case {"tools": [_, *_] as offered}:
                return [schema(tool) for tool in offered]
        raise EnvironmentFailed(f"OpenEnv server {self._url} offers no tools: {answer.observation[:300]}")

    async def reset(self, seed: int) -> Step:
        first = await self._world.reset(seed)
        self._shown = "" if first.observation == "{}" else first.observation
        return first._replace(observation=self._shown, info={**first.info, "state": self._shown})

    async def step(self, action: str) -> Step:
        """Call the tools in the policy's text, until the episode ends."""
        calls = calls_in(action)
        if calls is None:
            return Step("Call a tool.", info={"invalid": True, "rewarded": False, "state": self._shown})
        steps: list[Step] = []
        for call in calls:
            steps.append(heard(await self._world.step(json.dumps(call))))
            if steps[-1].done:
                break
        turn = joined(steps)
        self._shown = turn.observation
        return turn

    async def close(self) -> None:
        await self._world.close()


def schema(tool: Any) -> Tool:
    """Convert a tool to the format of chat templates."""
    match tool:
        case {"name": str(name), "input_schema": dict(parameters)}:
            function = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
            return {"type": "function", "function": function}
    raise EnvironmentFailed(f"a tool of OpenEnv has no name or no input_schema: {str(tool)[:200]}")


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """Return the actions in a policy's text; None if there are none, or one is malformed."""
    calls = [action(call) for call in CALL.findall(text) or [text]]
    return None if None in calls else [call for call in calls if call is not None]


def action(call: str) -> dict[str, Any] | None:
    """Parse a call, `{"name": …, "arguments": …}`, or with `parameters`, as some models write."""
    try:
        request = json.loads(call)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("name"), str):
        return None
    arguments = request.get("arguments", request.get("parameters", {}))
    return {"type": "call_tool", "tool_name": request["name"], "arguments": arguments}


def heard(step: Step) -> Step:
    """Return what the policy sees of a call's answer: the tool's text, or the error."""
    if step.info.get("invalid"):
        return step._replace(observation=step.observation.splitlines()[0])
    seen = json.loads(step.observation)
    error = seen.get("error") if isinstance(seen, dict) else None
    if isinstance(error, dict):
        invalid = error.get("error_type") in NO_ACTION
        text = f"Error: {error.get('message')}"
        return step._replace(observation=text, info={**step.info, "state": text, "invalid": invalid})
    text = result_text(seen.get("result") if isinstance(seen, dict) else seen)
    return step._replace(observation=text, info={**step.info, "state": text})


def result_text(result: Any) -> str:
    """Return the text of a tool's result: its text parts, or if there are none, all of it as JSON."""
    if isinstance(result, str):
        return result
    parts = result.get("content") if isinstance(result, dict) else None
    texts = [part["text"] for part in parts or () if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "\n".join(texts) if texts else json.dumps(result, ensure_ascii=False)


def joined(steps: Iterable[Step]) -> Step:
    """Join the steps of one turn: the observations line by line, and the sum of the rewards."""
    steps = list(steps)
    text = "\n".join(step.observation for step in steps)
    info = {
        "state": text,
        "invalid": any(step.info.get("invalid", False) for step in steps),
        "rewarded": any(step.info.get("rewarded", True) for step in steps),
    }
    return Step(text, sum(step.reward for step in steps), steps[-1].done, info)
