"""What a request passes before its route: the key, the limits of its body, and its session. Without vLLM.

`/sessions/NAME/v1/…` is served by the routes of `/v1/…` within an exchange of session NAME, which ends with the
response or with the session. In mode `serve` a completion at `/v1/…` belongs to the session that its header names, or
to a new one.

Errors of ours, FastAPI's and vLLM's get OpenAI's format: clients distinguish them by type and code.
https://platform.openai.com/docs/guides/error-codes lists the statuses; types and codes are those of its answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trinity_core.rollout.openai_api.recorded_session import Exchange
from trinity_core.rollout.openai_api.served_sessions import ServedSessions
from trinity_core.rollout.openai_api.session_auth import PREFIX, SESSION_ENDED, Refusal, SessionAuth

BODY_SECONDS = 60.0
"""Time for a body to arrive: a half-sent request would otherwise keep its connection open forever."""
MOST_BYTES = 64 << 20
"""Byte limit of a body; the longest conversations have a few million characters."""
COMPLETIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
SESSION_HEADER = b"x-trinity-session"
STREAMED = b'data: {"error"'
KINDS = {
    HTTPStatus.UNAUTHORIZED: ("authentication_error", "invalid_api_key"),
    HTTPStatus.NOT_FOUND: ("invalid_request_error", "not_found"),
    HTTPStatus.METHOD_NOT_ALLOWED: ("invalid_request_error", "method_not_allowed"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_exceeded"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("server_error", "service_unavailable"),
}
CODES = {
    "maximum context length": "context_length_exceeded",
    "The model `": "model_not_found",
    "error parsing the body": "invalid_json",
    "json_invalid": "invalid_json",
}
"""Part of a message of vLLM or FastAPI -> code of its error."""
_IN_SESSION = re.compile(rf"{PREFIX}([^/]+)(/v1/.*)")
_JSON = (b"content-type", b"application/json")


def openai_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an error: `message`, `type`, `param` and `code`. An error with a code in words is
    unchanged."""
    if isinstance(error.get("code"), str):
        return dict(error)
    message, param = str(error.get("message") or HTTPStatus(status).phrase), error.get("param")
    kind, code = KINDS.get(HTTPStatus(status), ("server_error" if status >= 500 else "invalid_request_error", None))
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        code = next((name for part, name in CODES.items() if part in message), code)
    if code == "context_length_exceeded":
        param = param or "messages"
    return {"message": message, "type": kind, "param": param, "code": code}


def error_in(body: bytes) -> Mapping[str, Any]:
    """Return the error in a body, in vLLM's or FastAPI's form; else its text."""
    try:
        content = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace")}
    error = content.get("error", content) if isinstance(content, Mapping) else content
    return {"message": error.get("detail"), **error} if isinstance(error, Mapping) else {"message": str(error)}


def streamed_error(chunk: bytes) -> bytes:
    """Return a chunk of a stream, its error, if it holds one, in OpenAI's format."""
    if not chunk.startswith(STREAMED):
        return chunk
    data, blank, rest = chunk.removeprefix(b"data: ").partition(b"\n\n")
    error = error_in(data)
    status = code if isinstance(code := error.get("code"), int) else HTTPStatus.INTERNAL_SERVER_ERROR
    return b"data: " + json.dumps({"error": openai_error(status, error)}).encode() + blank + rest


class OpenAIResponse:
    """Sends a response on: an error's body is rewritten, and the header names the session that the server opened."""

    def __init__(self, send: Send) -> None:
        self.session = ""
        """The session of a request to the address without one."""
        self.begun = False
        self._send = send
        self._status = 0
        """The status of an error whose body is still incomplete; 0 for other responses."""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            if message["status"] >= HTTPStatus.BAD_REQUEST:
                self._status = message["status"]
                return
            message = {**message, "headers": [*message["headers"], *self._headers()]}
        elif self._status:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._error(self._status, openai_error(self._status, error_in(self._body)))
            return
        else:
            message = {**message, "body": streamed_error(message.get("body", b""))}
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        await self._error(refusal.status, refusal.error)

    async def _error(self, status: int, error: Mapping[str, Any]) -> None:
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        start = {"type": "http.response.start", "status": status, "headers": [*headers, *self._headers()]}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [(SESSION_HEADER, self.session.encode())] if self.session else []


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
