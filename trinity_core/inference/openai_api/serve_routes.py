"""Routes of mode `serve`: clients open sessions, and give feedback. Without vLLM.

    POST /sessions                {"task": …}                                → session_id, base_url
    POST /feedback                {"session_id": …, "reward": …, "metrics": {…}, "comment": …}

`POST /v1/chat/completions` and `/v1/completions` are served in a session of their own, or in that of the header
`x-trinity-session`; the answer names its session in a header of the same name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from trinity_core.inference.openai_api.error_bodies import SESSION_HEADER
from trinity_core.inference.openai_api.recorded_session import RecordedSession
from trinity_core.inference.openai_api.request_limits import JsonRoute
from trinity_core.inference.openai_api.served_sessions import Feedback, ServedSessions, Text
from trinity_core.inference.openai_api.session_auth import PREFIX, SessionAuth


class NewSession(BaseModel):
    """A session that a client opens."""

    model_config = ConfigDict(extra="forbid", strict=True)
    task: Text = ""
    """Sessions with the same one are compared with each other."""


class SessionFeedback(Feedback):
    """Feedback on a session."""

    session_id: str = Field(min_length=1)


def serve_router(
    auth: SessionAuth, served_sessions: ServedSessions, close: Callable[[RecordedSession], None]
) -> APIRouter:
    """`close` ends a session for good."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/sessions")
    async def begin(request: Request, new: NewSession | None = None) -> dict[str, Any]:
        session = served_sessions.begin(new.task if new else "")
        auth.open(session)
        base_url = f"{request.url.scheme}://{request.url.netloc}{PREFIX}{session.name}/v1"
        return {"session_id": session.name, "base_url": base_url}

    @router.post("/feedback")
    async def judge(feedback: SessionFeedback) -> dict[str, Any]:
        session = served_sessions.give(feedback.session_id, feedback)
        close(session)
        return {"session_id": session.name, "sampled_tokens": session.sampled_tokens}

    return router


@asynccontextmanager
async def session_of_request(
    request: Request, auth: SessionAuth, served_sessions: ServedSessions
) -> AsyncIterator[None]:
    """Within this context a request at the address without a session is one of the session that its header names, or of
    a new one."""
    name, session = request.headers.get(SESSION_HEADER), None
    if name is None:
        session = served_sessions.begin()
        auth.open(session)
        name = session.name
    request.scope.setdefault("state", {})[SESSION_HEADER] = name
    try:
        with auth.exchange(name, request):
            yield
    finally:
        served_sessions.used(name)
        if session is not None and served_sessions.forget(session):
            auth.close(session)
