"""Our own routes beside those of the models. Without vLLM.

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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from trinity_core.base.errors import DataError
from trinity_core.data.task_queue import TaskQueue
from trinity_core.data.values import row_problem
from trinity_core.rollout.openai_api.middleware import SessionMiddleware
from trinity_core.rollout.openai_api.recorded_session import RecordedSession
from trinity_core.rollout.openai_api.served_sessions import Feedback, ServedSessions, Text
from trinity_core.rollout.openai_api.session_auth import PREFIX, Refusal, SessionAuth

VALIDATION_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
}
"""Error codes of our own routes by pydantic's error types; all others are `invalid_value`."""


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
    router = APIRouter()

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


class QueueName(BaseModel):
    model_config = ConfigDict(extra="forbid")
    taskset: str | None = None


class NewTasks(QueueName):
    tasks: list[dict[str, Any]]


def task_queue_router(queues: Mapping[str, TaskQueue]) -> APIRouter:
    """Return the routes. Their functions run in threads, as the queues are on disk."""
    router = APIRouter()

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
        matching = [queue for taskset, queue in queues.items() if name.taskset in (None, taskset)]
        if len(matching) != 1:
            raise Refusal(404, "taskset_not_found", f"give one of {', '.join(queues)}.", "taskset")
        return matching[0]

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
    auth: SessionAuth,
    served_sessions: ServedSessions | None,
    queues: Mapping[str, TaskQueue],
    close: Callable[[RecordedSession], Any],
) -> SessionMiddleware:
    """Return the application of the models, to which this adds our own routes, behind the `SessionMiddleware`.

    `close` ends a session for good.
    """
    app.router.redirect_slashes = False  # 404, as OpenAI's server: clients do not repeat a POST elsewhere
    if queues:
        app.include_router(task_queue_router(queues))
    if served_sessions is not None:
        app.include_router(serve_router(auth, served_sessions, close))
    modelled = app.exception_handlers.get(RequestValidationError)

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> Response:
        return JSONResponse({"error": refusal.error}, refusal.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        """Our own routes name the invalid field; vLLM's answer as vLLM does."""
        if modelled is not None and request.url.path.startswith("/v1/"):
            return await modelled(request, error)  # type: ignore[misc, no-any-return]
        first = error.errors()[0]
        path = [str(part) for part in first["loc"][1:]]
        if path and path[-1] == "[key]":  # a wrong name in an object
            path = path[:-2]
        code = VALIDATION_CODES.get(first["type"], "invalid_value")
        where = ".".join(path) if code != "invalid_json" else ""
        return await refused(request, Refusal(400, code, f"{where or 'the body'}: {first['msg']}.", where or None))

    return SessionMiddleware(app, auth, served_sessions)
