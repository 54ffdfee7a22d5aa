"""Errors as OpenAI's API spells them, from vLLM's: its clients and frameworks tell them apart by type and code.

https://platform.openai.com/docs/guides/error-codes has the statuses; types and codes are those of its answers. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from trinity_core.inference.openai_api.asgi import Message, Send

STREAMED = b'data: {"error"'
KINDS = {
    HTTPStatus.UNAUTHORIZED: ("authentication_error", "invalid_api_key"),
    HTTPStatus.NOT_FOUND: ("invalid_request_error", "not_found"),
    HTTPStatus.TOO_MANY_REQUESTS: ("rate_limit_error", "rate_limit_exceeded"),
    HTTPStatus.SERVICE_UNAVAILABLE: ("server_error", "service_unavailable"),
}
TOO_LONG = "maximum context length"
"""In the message of a prompt, or of a prompt and `max_tokens`, that the context does not hold."""
NO_MODEL = "The model `"


def openai_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an error: `message`, `type`, `param` and `code`. One that has a code in words stays as it is."""
    message, param = str(error.get("message") or HTTPStatus(status).phrase), error.get("param")
    if isinstance(error.get("code"), str):
        return dict(error)
    kind, code = KINDS.get(HTTPStatus(status), ("server_error" if status >= 500 else "invalid_request_error", None))
    if status == HTTPStatus.NOT_FOUND and message.startswith(NO_MODEL):
        code = "model_not_found"
    elif status == HTTPStatus.BAD_REQUEST and TOO_LONG in message:
        code, param = "context_length_exceeded", param or "messages"
    return {"message": message, "type": kind, "param": param, "code": code}


class SpelledErrors:
    """An ASGI `send` that spells errors so: whole responses, and errors within a stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        """Of a response that is an error; it is sent with its body."""
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
            self._start = message
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_error(self._start)
        elif message.get("body", b"").startswith(STREAMED):
            await self._send({**message, "body": _streamed(message["body"])})
        else:
            await self._send(message)

    async def _send_error(self, start: Message) -> None:
        status = start["status"]
        body = json.dumps({"error": openai_error(status, _error_in(self._body))}).encode()
        replaced = (b"content-length", b"content-type")
        headers = [(name, value) for name, value in start.get("headers", ()) if name.lower() not in replaced]
        headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._start = None
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _streamed(chunk: bytes) -> bytes:
    data, blank, rest = chunk.removeprefix(b"data: ").partition(b"\n\n")
    error = _error_in(data)
    code = error.get("code")
    status = code if isinstance(code, int) else HTTPStatus.INTERNAL_SERVER_ERROR
    return b"data: " + json.dumps({"error": openai_error(status, error)}).encode() + blank + rest


def _error_in(body: bytes) -> Mapping[str, Any]:
    """What a body says of an error, in vLLM's form or in FastAPI's; its text, if it has neither."""
    try:
        given = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace")}
    found = given.get("error", given) if isinstance(given, Mapping) else given
    if isinstance(found, Mapping):
        return {"message": found.get("detail"), **found}
    return {"message": str(found)}
