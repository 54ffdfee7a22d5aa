"""The key, and limits of a body's time and size, before FastAPI parses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from trinity_core.rollout.openai_api.session_auth import Refusal

SECONDS = 60.0
"""Time for a body to arrive: a half-sent request would otherwise keep its connection open forever."""
MOST_BYTES = 64 << 20
"""Byte limit of any request; the longest conversations have a few million characters."""
MOST_BYTES_OF_ONE = 1 << 20
"""Byte limit of requests for a session, of feedback, and of tasks."""
JSON = (b"content-type", b"application/json")


class LimitedRequest(Request):
    """A request that refuses a body that is too long or too late."""

    most_bytes = MOST_BYTES

    async def body(self) -> bytes:
        """See `Request`. Raises Refusal."""
        if not hasattr(self, "_body"):
            try:
                body = await asyncio.wait_for(self._read(), SECONDS)
            except TimeoutError:
                raise Refusal(408, "request_timeout", f"the body did not come within {SECONDS:g} s.") from None
            except ClientDisconnect:
                raise Refusal(400, "disconnected", "the client went away before its body had come.") from None
            self._body = b"" if body.isspace() else body
        return self._body

    async def _read(self) -> bytes:
        body = bytearray()
        async for part in self.stream():
            body += part
            if len(body) > self.most_bytes:
                raise Refusal(413, "too_large", f"the body has more than {self.most_bytes} bytes.")
        return bytes(body)


class ModelRoute(APIRoute):
    """A route of vLLM's requests. `app.state.auth` knows the key."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            request.app.state.auth.check_key(request)
            within_limits = self.limited_request(request)
            await within_limits.body()  # read here: FastAPI would report any fault as an unparsable body
            return await handle(within_limits)

        return limited

    def limited_request(self, request: Request) -> LimitedRequest:
        return LimitedRequest(request.scope, request.receive)


class JsonRoute(ModelRoute):
    """A route of our own requests: short JSON, whatever its content type (`curl -d` declares a form)."""

    def limited_request(self, request: Request) -> LimitedRequest:
        headers = [header for header in request.scope["headers"] if header[0] != JSON[0]]
        limited = LimitedRequest({**request.scope, "headers": [*headers, JSON]}, request.receive)
        limited.most_bytes = MOST_BYTES_OF_ONE
        return limited
