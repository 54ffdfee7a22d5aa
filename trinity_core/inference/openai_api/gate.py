"""What every request passes: the key, the session, and the end of the session while it is served. Without vLLM."""

from __future__ import annotations

import asyncio
import secrets

from trinity_core.inference.openai_api.asgi import App, Message, Receive, Scope, Send, refuse
from trinity_core.inference.openai_api.body import again, whole_body
from trinity_core.inference.openai_api.error_bodies import SpelledErrors
from trinity_core.inference.openai_api.feedback import Refusal
from trinity_core.inference.openai_api.live import EXCHANGE, RecordedSession

PREFIX = "/sessions/"
REMEMBERED = 100_000
"""Names of ended sessions that are known as such."""


class Gate:
    """An ASGI application around `app`: `/v1/…` for anyone with the key, `/sessions/NAME/v1/…` for a session."""

    def __init__(self, app: App, key: str) -> None:
        self._app, self._key = app, key
        self._open: dict[str, RecordedSession] = {}
        self._ended: dict[str, None] = {}

    def open(self, session: RecordedSession) -> None:
        """Serve it. From any thread."""
        self._open[session.name] = session

    def close(self, session: RecordedSession) -> bool:
        """Serve it no more: its requests in flight end, later ones are refused. True the first time."""
        session.end()
        if self._open.pop(session.name, None) is None:
            return False
        self._ended[session.name] = None
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not self.has_key(scope):
            await refuse(send, 401, "Incorrect API key provided.", "authentication_error", "invalid_api_key")
        else:
            await self._with_key(scope, receive, send)

    def has_key(self, scope: Scope) -> bool:
        """Whether a request brings the key."""
        given = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(given, f"Bearer {self._key}".encode())

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            receive = again(await whole_body(receive), receive)
        except Refusal as refusal:
            await refuse(send, refusal.status, str(refusal), "invalid_request_error", refusal.code, refusal.param)
            return
        if scope["path"].startswith(PREFIX):
            await self._in_session(scope, receive, send)
        else:
            await self._app(scope, receive, SpelledErrors(send))

    async def _in_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, slash, rest = scope["path"][len(PREFIX) :].partition("/")
        session = self._open.get(name)
        exchange = None if session is None else session.begin()
        if exchange is None:
            if session is not None or name in self._ended:
                await refuse(send, 410, "This session has ended.", "invalid_request_error", "session_ended")
            else:
                await refuse(send, 404, "There is no such session.", "invalid_request_error", "session_not_found")
            return
        path = slash + rest
        inner = {**scope, "path": path, "raw_path": path.encode()}
        answering = Answering(send)
        EXCHANGE.set(exchange)
        task = asyncio.ensure_future(self._app(inner, receive, SpelledErrors(answering)))
        exchange.runs_in(task)
        try:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
            elif not answering.begun:
                await refuse(send, 410, "This session has ended.", "invalid_request_error", "session_ended")
        finally:
            task.cancel()
            exchange.close()


class Answering:
    """An ASGI `send` that knows whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        """See ASGI."""
        self.begun = True
        await self._send(message)
