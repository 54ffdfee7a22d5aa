"""The words of ASGI, and responses in JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def refuse(send: Send, status: int, message: str, kind: str, code: str, param: str | None = None) -> None:
    """An error as OpenAI's API spells it."""
    await answer(send, status, {"error": {"message": message, "type": kind, "param": param, "code": code}})


async def answer(send: Send, status: int, value: Any) -> None:
    """A response in JSON."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
