"""The keys of the API, and the sessions that it serves. Without vLLM."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_core.rollout.openai_api.recorded_session import EXCHANGE, Exchange, RecordedSession

PREFIX = "/sessions/"
REMEMBERED = 100_000
"""Number of ended sessions that are remembered."""
SESSION_ENDED = (410, "session_ended", "This session has ended.")


class Refusal(Exception):
    """The error body for a request that cannot be served."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}


class SessionAuth:
    """Accepts requests with the key, and those within a session while it is open.

    `session_key` opens only sessions: a workflow gives it to an agent, which must not end the run's task queue.
    """

    def __init__(self, key: str, session_key: str) -> None:
        self._key, self._session_key = (f"Bearer {secret}".encode() for secret in (key, session_key))
        self._open: dict[str, RecordedSession] = {}
        self._ended: dict[str, None] = {}

    def open(self, session: RecordedSession) -> None:
        """Serve a session. From any thread."""
        self._open[session.name] = session

    def close(self, session: RecordedSession) -> bool:
        """Stop serving it: its requests in flight end, later ones are refused. True the first time."""
        session.end()
        if self._open.pop(session.name, None) is None:
            return False
        self._ended[session.name] = None
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return True

    def check_key(self, path: str, authorization: str) -> None:
        """Raise Refusal unless a request's header has the key, or for a path within a session, the session key."""
        keys = [self._key, self._session_key] if path.startswith(PREFIX) else [self._key]
        if not any(secrets.compare_digest(authorization.encode("latin-1"), key) for key in keys):
            raise Refusal(401, "invalid_api_key", "Incorrect API key provided.", kind="authentication_error")

    @contextmanager
    def exchange(self, name: str) -> Iterator[Exchange]:
        """A context in which a request belongs to session `name`. Raises Refusal if it is not open."""
        session = self._open.get(name)
        exchange = None if session is None else session.begin()
        if exchange is None:
            if session is not None or name in self._ended:
                raise Refusal(*SESSION_ENDED)
            raise Refusal(404, "session_not_found", "There is no such session.")
        token = EXCHANGE.set(exchange)
        try:
            yield exchange
        finally:
            EXCHANGE.reset(token)
            exchange.close()
