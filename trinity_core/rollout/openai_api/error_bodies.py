"""Errors of ours, FastAPI's and vLLM's in OpenAI's format: clients distinguish them by type and code.

https://platform.openai.com/docs/guides/error-codes lists the statuses; types and codes are those of its answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Send

from trinity_core.rollout.openai_api.session_auth import Refusal

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
