"""The body of a request, within limits of time and size. Without vLLM."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from trinity_core.inference.openai_api.asgi import Message, Receive, Scope
from trinity_core.inference.openai_api.feedback import Refusal

SECONDS = 60.0
"""For a body to come: a request that stays half sent would keep its session for ever."""
MOST_BYTES = 64 << 20
"""Of any request; the longest conversations have a few million characters."""
MOST_BYTES_ABOUT_SESSIONS = 1 << 20
"""Of a request for a session, of feedback, and of tasks."""


async def whole_body(receive: Receive, most: int = MOST_BYTES) -> bytes:
    """The body. Raises Refusal if it is too long, too late, or never ends."""
    try:
        return await asyncio.wait_for(_body(receive, most), SECONDS)
    except TimeoutError:
        raise Refusal(408, "request_timeout", f"the body did not come within {SECONDS:g} s.") from None


async def json_body(scope: Scope, receive: Receive) -> Any:
    """The body of a POST request as JSON, None if it is empty. Raises Refusal."""
    if scope["method"] != "POST":
        raise Refusal(405, "method_not_allowed", "send a POST request.")
    body = await whole_body(receive, MOST_BYTES_ABOUT_SESSIONS)
    try:
        return json.loads(body) if body.strip() else None
    except ValueError as error:
        raise Refusal(400, "invalid_json", f"the body is no JSON: {error}.") from None


def again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read, and after it what `receive` gives."""
    first = True

    async def receiving() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return receiving


async def _body(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "disconnected", "the client went away.")
        body += message.get("body", b"")
        if len(body) > most:
            raise Refusal(413, "too_large", f"the body has more than {most} bytes.")
        if not message.get("more_body"):
            return bytes(body)
