"""The OpenAI API assembled: authentication, sessions, OpenAI's error format, and our own routes. Without vLLM.

In mode `serve`, clients open sessions and give feedback:

  POST /sessions                {"task": …}                                → session_id, base_url
  POST /feedback                {"session_id": …, "reward": …, "metrics": {…}, "comment": …}

`POST /v1/chat/completions` and `/v1/completions` are served in a session of their own, or in that of the header
`x-trinity-session`; the answer names its session in the same header.

For task sets of `storage_type: queue`, programs add tasks; `taskset` may be omitted if there is one queue:

  GET  /tasks                                           → {"NAME": {"tasks": 12, "ended": false}}
  POST /tasks       {"tasks": [{…}, …], "taskset": …}   → {"added": 2}
  POST /tasks/end   {"taskset": …}                      → {"tasks": 12}
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from trinity_core.base.errors import DataError
from trinity_core.data.task_queue import TaskQueue
from trinity_core.data.values import row_problem
from trinity_core.rollout.openai_api.error_bodies import SESSION_HEADER, add_error_handlers
from trinity_core.rollout.openai_api.recorded_session import RecordedSession
from trinity_core.rollout.openai_api.request_limits import JsonRoute
from trinity_core.rollout.openai_api.served_sessions import Feedback, ServedSessions, Text
from trinity_core.rollout.openai_api.session_auth import PREFIX, Refusal, SessionAuth

InSession = Callable[..., AsyncIterator[None]]
"""A FastAPI dependency within which a request belongs to a session."""


class NewSession(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    task: Text = ""
    """Sessions with the same task are compared with each other."""


class SessionFeedback(Feedback):
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
    """A context in which a request without a session in its address belongs to the session of its header, or to a new
    one."""
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


class QueueName(BaseModel):
    taskset: str | None = None


class NewTasks(QueueName):
    tasks: list[dict[str, Any]]


def task_queue_router(queues: Mapping[str, TaskQueue]) -> APIRouter:
    """Return the routes. Their functions run in threads, as the queues are on disk."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/tasks")
    def counts() -> dict[str, Any]:
        with refusing():
            tasks = {name: queue.count() for name, queue in queues.items()}
        return {name: {"tasks": count, "ended": ended} for name, (count, ended) in tasks.items()}

    @router.post("/tasks")
    def add(new: NewTasks) -> dict[str, Any]:
        queue = chosen(new)
        for number, task in enumerate(new.tasks):
            if problem := row_problem(task):
                raise Refusal(400, "invalid_tasks", f"task {number} {problem}.", "tasks")
        with refusing():
            return {"added": queue.add(new.tasks)}

    @router.post("/tasks/end")
    def end(name: QueueName | None = None) -> dict[str, Any]:
        queue = chosen(name or QueueName())
        with refusing():
            queue.end()
            return {"tasks": queue.count()[0]}

    def chosen(name: QueueName) -> TaskQueue:
        wanted = [queue for known, queue in queues.items() if name.taskset in (None, known)]
        if len(wanted) != 1:
            raise Refusal(404, "taskset_not_found", f"give one of {', '.join(queues)}.", "taskset")
        return wanted[0]

    return router


@contextmanager
def refusing() -> Iterator[None]:
    """Answer 409 if a queue refuses a request: it has ended, or its database is locked."""
    try:
        yield
    except DataError as error:
        raise Refusal(409, "queue_refused", str(error)) from error


def application(
    app: FastAPI,
    model_router: Callable[[InSession | None], APIRouter],
    auth: SessionAuth,
    served_sessions: ServedSessions | None,
    queues: Mapping[str, TaskQueue],
    close: Callable[[RecordedSession], Any],
) -> FastAPI:
    """Add all routes to `app`: `/v1/…` for anyone with the key, `/sessions/NAME/v1/…` for a session.

    `model_router` makes the routes of the models from a dependency that opens a session for each generation request, or
    None. `close` ends a session for good.
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
    app.router.redirect_slashes = False  # 404, as OpenAI's server: clients do not repeat a POST elsewhere
    app.include_router(model_router(None if served_sessions is None else in_own_session), prefix="/v1")
    app.include_router(model_router(None), prefix=f"{PREFIX}{{session}}/v1", dependencies=[Depends(in_session)])
    if queues:
        app.include_router(task_queue_router(queues))
    if served_sessions is not None:
        app.include_router(serve_router(auth, served_sessions, close))
    add_error_handlers(app)
    return app
