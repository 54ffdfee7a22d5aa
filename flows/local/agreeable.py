"""In place of a Prefect server that cannot be started again: accepts what a run reports to it, and keeps none of it.

An ASGI application, served like Prefect's own. It imports no Prefect and opens no database, so that it starts where the
server does not. The run's flows and tasks end as if they had been reported; Prefect shows nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUIRED = {"name": "unknown", "task_key": "unknown", "dynamic_key": "unknown"}
"""What Prefect's client expects of something that was made before this server began."""


class AgreeableServer:
    """As much of Prefect's API as a run uses."""

    def __init__(self) -> None:
        self._made: dict[str, dict[str, Any]] = {}
        """What the run has made since this server began, and what it has changed: id -> fields."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """The application."""
        serve = {"http": self._request, "websocket": self._events, "lifespan": self._lifespan}[scope["type"]]
        await serve(scope, receive, send)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the answer to a request."""
        fields = body if isinstance(body, dict) else {}
        *_, parent, last = path.split("/")
        match method, last:
            case "GET", "health" | "ready":
                return 200, True
            case "GET", "version":
                return 200, version("prefect")
            case "GET", "csrf-token":
                return 422, {"detail": "CSRF protection is disabled."}
            case "GET", _:
                return 200, self._known(last)
            case "PATCH", _:
                self._known(last).update(fields)
                return 204, None
            case "POST", "filter":
                return 200, []
            case "POST", "set_state":
                state = _identified(fields["state"])
                self._known(parent)["state"] = state
                return 200, {"state": state, "status": "ACCEPT", "details": {"type": "accept_details"}}
            case _:
                made = _identified(fields)
                self._made[made["id"]] = made
                return 201, made

    def _known(self, name: str) -> dict[str, Any]:
        return self._made.setdefault(name, {"id": name, "flow_id": name, **REQUIRED})

    async def _request(self, scope: Message, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status, found = self.answer(scope["method"], scope["path"].rstrip("/"), json.loads(body or b"null"))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if status == 204 else json.dumps(found).encode()})

    async def _events(self, scope: Message, receive: Receive, send: Send) -> None:
        """The stream of events, whose first message asks to be let in."""
        await send({"type": "websocket.accept", "subprotocol": next(iter(scope["subprotocols"]), None)})
        welcomed = False
        while (message := await receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive" and not welcomed:
                welcomed = True
                await send({"type": "websocket.send", "text": json.dumps({"type": "auth_success"})})

    async def _lifespan(self, scope: Message, receive: Receive, send: Send) -> None:
        for _ in ("startup", "shutdown"):
            await send({"type": f"{(await receive())['type']}.complete"})


def _identified(fields: dict[str, Any]) -> dict[str, Any]:
    """As the server returns what it has made: with an id and the time, and without what is not set."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"id": str(uuid4()), "timestamp": datetime.now(UTC).isoformat(), **given}


app = AgreeableServer()
