"""What a request passes before its route: the key, the limits of its body, and its session. Without vLLM.

`/sessions/NAME/v1/…` is served by the routes of `/v1/…` within an exchange of session NAME, which ends with the
response or with the session. In mode `serve` a completion at `/v1/…` belongs to the session that its header names, or
to a new one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trinity_core.rollout.openai_api.error_bodies import SESSION_HEADER, OpenAIResponse
from trinity_core.rollout.openai_api.recorded_session import Exchange
from trinity_core.rollout.openai_api.served_sessions import ServedSessions
from trinity_core.rollout.openai_api.session_auth import PREFIX, SESSION_ENDED, Refusal, SessionAuth

BODY_SECONDS = 60.0
"""Time for a body to arrive: a half-sent request would otherwise keep its connection open forever."""
MOST_BYTES = 64 << 20
"""Byte limit of a body; the longest conversations have a few million characters."""
COMPLETIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_IN_SESSION = re.compile(rf"{PREFIX}([^/]+)(/v1/.*)")
_JSON = (b"content-type", b"application/json")


class SessionMiddleware:
    """Serves requests that have the key, those of sessions within an exchange. Errors are in OpenAI's format."""

    def __init__(self, app: ASGIApp, auth: SessionAuth, served_sessions: ServedSessions | None = None) -> None:
        self._app, self._auth, self._served = app, auth, served_sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = OpenAIResponse(send)
        try:
            self._auth.check_key(scope["path"], Headers(scope=scope).get("authorization", ""))
            receive = await _with_body(receive)
            if found := _IN_SESSION.fullmatch(scope["path"]):
                name, path = found.groups()
                await self._in_session(name, {**scope, "path": path, "raw_path": path.encode()}, receive, response)
            elif self._served is not None and scope["path"] in COMPLETIONS:
                await self._in_header_session(self._served, scope, receive, response)
            else:
                await self._app(scope if "/v1/" in scope["path"] else _as_json(scope), receive, response)
        except Refusal as refusal:
            await response.refuse(refusal)

    async def _in_header_session(
        self, served: ServedSessions, scope: Scope, receive: Receive, response: OpenAIResponse
    ) -> None:
        """Serve a request in the session of its header, or in a new one, which goes if nothing was recorded in it."""
        name, opened = Headers(scope=scope).get(SESSION_HEADER.decode()), None
        if name is None:
            opened = served.begin()
            self._auth.open(opened)
            name = opened.name
        response.session = name
        try:
            await self._in_session(name, scope, receive, response)
        finally:
            if opened is not None and served.forget(opened):
                self._auth.close(opened)

    async def _in_session(self, name: str, scope: Scope, receive: Receive, response: OpenAIResponse) -> None:
        try:
            with self._auth.exchange(name) as exchange:
                await _while_open(exchange, self._app(scope, receive, response), response)
        finally:
            if self._served is not None:
                self._served.used(name)


async def _while_open(exchange: Exchange, serving: Awaitable[None], response: OpenAIResponse) -> None:
    """Serve a request until its session ends. Raises Refusal if the session ends before the response begins."""
    task = asyncio.ensure_future(serving)
    exchange.runs_in(task)
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if not task.cancelled():
        task.result()
    elif not response.begun:
        raise Refusal(*SESSION_ENDED)


def _as_json(scope: Scope) -> Scope:
    """Declare the body of our own routes JSON, whatever its content type: `curl -d` declares a form."""
    return {**scope, "headers": [*(header for header in scope["headers"] if header[0] != _JSON[0]), _JSON]}


async def _with_body(receive: Receive) -> Receive:
    """Read the body; return a `receive` that gives it as one message. Raises Refusal if it is too long or too late."""
    try:
        body = await asyncio.wait_for(_read(receive), BODY_SECONDS)
    except TimeoutError:
        raise Refusal(408, "request_timeout", f"the body did not come within {BODY_SECONDS:g} s.") from None
    messages: list[Message] = [{"type": "http.request", "body": b"" if body.isspace() else body}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


async def _read(receive: Receive) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "disconnected", "the client went away before its body had come.")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MOST_BYTES:
            raise Refusal(413, "too_large", f"the body has more than {MOST_BYTES} bytes.")
    return bytes(body)
