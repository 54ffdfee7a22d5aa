"""Client connections: limits for the head of a request, and detection of clients that leave before they have read an
answer.

HTTP does not tell a server what a client has read, but its kernel does: closing a connection with unread bytes, or to
which bytes arrive later, resets it (RFC 9293, section 3.6.1; RFC 1122, section 4.2.2.13).
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trinity_core.inference.openai_api.recorded_session import CONNECTION, Exchange

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
