"""Where programs with the run's key add tasks to its queues (task sets of `storage_type: queue`). Without vLLM.

    GET  /tasks                                           → {"NAME": {"tasks": 12, "ended": false}}
    POST /tasks       {"tasks": [{…}, …], "taskset": …}   → {"added": 2}
    POST /tasks/end   {"taskset": …}                      → {"tasks": 12}

`taskset` may be left out where there is one queue. All else goes to the application behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from trinity_core.data.row_validation import row_problem
from trinity_core.data.task_queue import TaskQueue
from trinity_core.errors import DataError
from trinity_core.inference.openai_api.asgi import App, Receive, Scope, Send, answer, refuse
from trinity_core.inference.openai_api.body import json_body
from trinity_core.inference.openai_api.feedback import Refusal
from trinity_core.inference.openai_api.gate import Gate


class TaskDoor:
    """An ASGI application in front of `app`."""

    def __init__(self, gate: Gate, app: App, queues: Mapping[str, TaskQueue]) -> None:
        """`gate` knows the key."""
        self._gate, self._app, self._queues = gate, app, queues

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "").rstrip("/")
        if scope["type"] != "http" or path not in ("/tasks", "/tasks/end") or not self._gate.has_key(scope):
            await self._app(scope, receive, send)
            return
        try:
            if path == "/tasks" and scope["method"] == "GET":
                await answer(send, 200, await asyncio.to_thread(self._counts))
            else:
                given = await json_body(scope, receive)
                serve = self._add if path == "/tasks" else self._end
                await answer(send, 200, await asyncio.to_thread(serve, {} if given is None else given))
        except Refusal as refusal:
            await refuse(send, refusal.status, str(refusal), "invalid_request_error", refusal.code, refusal.param)
        except DataError as error:
            await refuse(send, 409, str(error), "invalid_request_error", "queue_refused")

    def _counts(self) -> dict[str, Any]:
        counts = {name: queue.count() for name, queue in self._queues.items()}
        return {name: {"tasks": count, "ended": ended} for name, (count, ended) in counts.items()}

    def _add(self, given: Any) -> dict[str, Any]:
        queue = self._queue(given)
        tasks = given.get("tasks")
        if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
            raise Refusal(400, "invalid_tasks", "give a list of objects.", "tasks")
        for number, task in enumerate(tasks):
            if problem := row_problem(task):
                raise Refusal(400, "invalid_tasks", f"task {number} {problem}.", "tasks")
        return {"added": queue.add(tasks)}

    def _end(self, given: Any) -> dict[str, Any]:
        queue = self._queue(given)
        queue.end()
        return {"tasks": queue.count()[0]}

    def _queue(self, given: Any) -> TaskQueue:
        if not isinstance(given, dict):
            raise Refusal(400, "invalid_json", "give an object.")
        name = given.get("taskset")
        found = [queue for each, queue in self._queues.items() if name in (None, each)]
        if len(found) != 1:
            raise Refusal(404, "taskset_not_found", f"give one of {', '.join(self._queues)}.", "taskset")
        return found[0]
