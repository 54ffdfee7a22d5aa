"""Routes by which programs add tasks to the run's queues (task sets of `storage_type: queue`). Without vLLM.

    GET  /tasks                                           → {"NAME": {"tasks": 12, "ended": false}}
    POST /tasks       {"tasks": [{…}, …], "taskset": …}   → {"added": 2}
    POST /tasks/end   {"taskset": …}                      → {"tasks": 12}

`taskset` may be left out where there is one queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from trinity_core.data.task_queue import TaskQueue
from trinity_core.data.values import row_problem
from trinity_core.errors import DataError
from trinity_core.inference.openai_api.request_limits import JsonRoute
from trinity_core.inference.openai_api.session_auth import Refusal


class QueueName(BaseModel):
    """Which queue is meant."""

    taskset: str | None = None


class NewTasks(QueueName):
    """Tasks to add."""

    tasks: list[dict[str, Any]]


def task_queue_router(queues: Mapping[str, TaskQueue]) -> APIRouter:
    """The routes. Their functions run in threads, as the queues are on disk."""
    router = APIRouter(route_class=JsonRoute)

    @router.get("/tasks")
    def counts() -> dict[str, Any]:
        with refusing():
            found = {name: queue.count() for name, queue in queues.items()}
        return {name: {"tasks": count, "ended": ended} for name, (count, ended) in found.items()}

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
    """Answer with 409 what a queue refuses: it has ended already, or its database is locked."""
    try:
        yield
    except DataError as error:
        raise Refusal(409, "queue_refused", str(error)) from error
