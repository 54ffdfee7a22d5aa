"""What clients of mode `serve` come to first: they open sessions, give feedback, or just ask. Without vLLM.

    POST /sessions                {"task": …}                                → session_id, base_url
    POST /feedback                {"session_id": …, "reward": …, "metrics": {…}, "comment": …}
    POST /v1/chat/completions     in a session of its own, or in that of the header `x-trinity-session`

The answer to the last names its session in a header of the same name. All else goes to the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_core.inference.openai_api.asgi import Message, Receive, Scope, Send, answer, refuse
from trinity_core.inference.openai_api.body import json_body
from trinity_core.inference.openai_api.book import SessionBook
from trinity_core.inference.openai_api.feedback import Refusal, task_of
from trinity_core.inference.openai_api.gate import PREFIX, Gate
from trinity_core.inference.openai_api.live import RecordedSession

SESSION_HEADER = b"x-trinity-session"
ASKS = ("/v1/chat/completions", "/v1/completions")


class Reception:
    """An ASGI application in front of the gate."""

    def __init__(self, gate: Gate, book: SessionBook, close: Callable[[RecordedSession], None]) -> None:
        """`close` ends a session for good."""
        self._gate, self._book, self._close = gate, book, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not self._gate.has_key(scope):
            await self._gate(scope, receive, send)
            return
        path = scope["path"].rstrip("/")
        try:
            if path == "/sessions":
                await answer(send, 200, self._begin(scope, await json_body(scope, receive)))
            elif path == "/feedback":
                await answer(send, 200, self._judge(await json_body(scope, receive)))
            elif path in ASKS and scope["method"] == "POST":
                await self._ask(path, scope, receive, send)
            else:
                await self._gate(scope, receive, send)
        except Refusal as refusal:
            await refuse(send, refusal.status, str(refusal), "invalid_request_error", refusal.code, refusal.param)
        finally:
            if path.startswith(PREFIX):
                self._book.used(path[len(PREFIX) :].partition("/")[0])

    def _begin(self, scope: Scope, given: Any) -> dict[str, Any]:
        session = self._book.begin(task_of({} if given is None else given))
        self._gate.open(session)
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1") or ":".join(map(str, scope["server"]))
        return {"session_id": session.name, "base_url": f"{scope['scheme']}://{host}{PREFIX}{session.name}/v1"}

    def _judge(self, given: Any) -> dict[str, Any]:
        session = self._book.give(given)
        self._close(session)
        return {"session_id": session.name, "sampled_tokens": session.sampled_tokens}

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request at the address without a session, in one."""
        named = dict(scope["headers"]).get(SESSION_HEADER)
        session = None
        if named is None:
            session = self._book.begin()
            self._gate.open(session)
        name = session.name if session is not None else (named or b"").decode("latin-1")
        inside = f"{PREFIX}{name}{path}"

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (SESSION_HEADER, name.encode("latin-1"))
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._gate({**scope, "path": inside, "raw_path": inside.encode()}, receive, naming)
        finally:
            self._book.used(name)
            if session is not None and self._book.forget(session):
                self._gate.close(session)
