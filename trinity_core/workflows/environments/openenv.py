"""Environments over HTTP: a server of OpenEnv's protocol, one WebSocket session for each rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from trinity_core.errors import InputError
from trinity_core.lazy import aiohttp
from trinity_core.waits import poll_async
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

    def _step(self, asked: str, answer: Any) -> Step:
        match answer:
            case {
                "type": "observation",
                "data": {"observation": seen, "reward": None | int() | float() as reward, "done": bool(done)},
            }:
                self._shown = self._text(seen)
                info = {"state": self._shown, "rewarded": reward is not None}
                return Step(self._shown, float(reward or 0.0), done, info)
            case {"type": "error", "data": {"code": "VALIDATION_ERROR"} as data} if asked == "step":
                text = f"That is no action. {_reasons(data)}\n{self._shown}".strip()
                return Step(text, info={"invalid": True, "rewarded": False, "state": self._shown})
            case {"type": "error", "data": {"code": "CAPACITY_REACHED"} as data}:
                raise _NotNow(f"OpenEnv server {self._url} is full: {data.get('message')}")
            case {"type": "error", "data": data}:
                raise EnvironmentFailed(f"OpenEnv server {self._url} refuses a {asked}: {str(data)[:300]}")
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
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors if isinstance(one, dict)
    )
