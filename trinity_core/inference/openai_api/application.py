"""The routes of the OpenAI API put together: the key, the sessions, errors as OpenAI spells them. Without vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request

from trinity_core.data.task_queue import TaskQueue
from trinity_core.inference.openai_api.error_bodies import add_error_handlers
from trinity_core.inference.openai_api.recorded_session import RecordedSession
from trinity_core.inference.openai_api.serve_routes import serve_router, session_of_request
from trinity_core.inference.openai_api.served_sessions import ServedSessions
from trinity_core.inference.openai_api.session_auth import PREFIX, SessionAuth
from trinity_core.inference.openai_api.task_queue_routes import task_queue_router

InSession = Callable[..., AsyncIterator[None]]
"""A dependency of FastAPI within which a request belongs to a session."""


def application(
    app: FastAPI,
    model_router: Callable[[InSession | None], APIRouter],
    auth: SessionAuth,
    served_sessions: ServedSessions | None,
    queues: Mapping[str, TaskQueue],
    close: Callable[[RecordedSession], Any],
) -> FastAPI:
    """`app` with all routes: `/v1/…` for anyone with the key, `/sessions/NAME/v1/…` for a session.

    `model_router` makes the routes of the models, given a session for each request for answers, or None. `close` ends a
    session for good.
    """

    async def in_session(session: str, request: Request) -> AsyncIterator[None]:
        try:
            with auth.exchange(session, request):
                yield
        finally:
            if served_sessions is not None:
                served_sessions.used(session)

    async def in_own_session(request: Request) -> AsyncIterator[None]:
        assert served_sessions is not None
        async with session_of_request(request, auth, served_sessions):
            yield

    app.state.auth = auth
    app.router.redirect_slashes = False  # OpenAI's server answers 404; clients do not repeat a POST at another address
    app.include_router(model_router(None if served_sessions is None else in_own_session), prefix="/v1")
    app.include_router(model_router(None), prefix=f"{PREFIX}{{session}}/v1", dependencies=[Depends(in_session)])
    if queues:
        app.include_router(task_queue_router(queues))
    if served_sessions is not None:
        app.include_router(serve_router(auth, served_sessions, close))
    add_error_handlers(app)
    return app
