"""Routes that check the key and read bodies within limits of time and size, before FastAPI parses them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from trinity_core.inference.openai_api.session_auth import Refusal

SECONDS = 60.0
"""Time for a body to arrive: a half-sent request would otherwise keep its connection open forever."""
MOST_BYTES = 64 << 20
"""Byte limit of any request; the longest conversations have a few million characters."""
MOST_BYTES_OF_ONE = 1 << 20
"""Byte limit of requests for a session, of feedback, and of tasks."""
MOST_DEPTH = 200
MOST_TOKENS = 65_000
"""Limit of strings and brackets in a body: 10,000 messages of a role and a text, 6 each, and the rest of the
request."""
MOST_NUMBERS = 2_000_000
"""Limit of commas outside strings: they separate values, such as the token ids of a prompt."""
TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[\[\]{}]', re.DOTALL)
JSON = (b"content-type", b"application/json")


class LimitedRequest(Request):
    """A request that refuses a body that is too long, too late, or JSON that would block the server."""

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
            check_json(body)
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


def check_json(body: bytes) -> None:
    """Raise Refusal for JSON that would block the server for seconds, or that Python's parser cannot handle.

    Scans only strings and brackets; in between, only commas are counted.
    """
    depth = commas = end = 0
    for number, token in enumerate(TOKENS.finditer(body)):
        commas, end = commas + body.count(b",", end, token.start()), token.end()
        first = body[token.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MOST_DEPTH:
            raise Refusal(400, "invalid_json", f"the body is nested more than {MOST_DEPTH} levels deep.")
        if number >= MOST_TOKENS:
            raise Refusal(413, "too_large", f"the body has more than {MOST_TOKENS} strings and brackets.")
    if commas + body.count(b",", end) > MOST_NUMBERS:
        raise Refusal(413, "too_large", f"the body has more than {MOST_NUMBERS} values.")
