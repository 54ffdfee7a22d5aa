"""Requests and their connections: the key, limits of time and size before FastAPI parses a body, and detection of
clients that leave before they have read an answer.

HTTP does not tell a server what a client has read, but its kernel does: closing a connection with unread bytes, or to
which bytes arrive later, resets it (RFC 9293, section 3.6.1; RFC 1122, section 4.2.2.13).
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trinity_core.inference.openai_api.recorded_session import CONNECTION, Exchange
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


HEAD_SECONDS = 20.0
"""Time for the head of a request to arrive; uvicorn ends idle connections sooner."""
MOST_HEAD_BYTES = 1 << 20
CLOSED = 7
"""Linux's TCP_CLOSE: the state of a connection that was reset."""
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ClientConnection(HttpToolsProtocol):
    """uvicorn's protocol; each request's scope refers to it in its state."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self.answered: Exchange | None = None
        """The request answered last, until another one arrives: then its client has read it."""
        self.lost = False
        self._was_reset = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def was_cut(self) -> bool:
        """True if the client closed it without reading everything sent. From any thread."""
        if not self.lost and sys.platform == "linux":
            try:
                client: socket.socket = self.transport.get_extra_info("socket")
                return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSED
            except OSError:  # the connection was lost in the meantime
                pass
        return self._was_reset

    # ---- see asyncio.Protocol and uvicorn's ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._awaits_head and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.answered = None

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._was_reset, self.lost = isinstance(exc, OSError), True
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    # ---- inside ----

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._check_head)

    def _check_head(self) -> None:
        if self._awaits_head:
            self._refuse(LATE)

    def _refuse(self, response: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(response)
            self.transport.close()
