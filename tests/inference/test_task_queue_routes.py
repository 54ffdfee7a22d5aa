"""Adding tasks over HTTP, with the run's key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trinity_core.data.task_queue import TaskQueue
from trinity_core.rollout.openai_api.application import application
from trinity_core.rollout.openai_api.session_auth import SessionAuth

KEY = {"authorization": "Bearer secret"}


@pytest.fixture
def queues(tmp_path: Path) -> dict[str, TaskQueue]:
    by_name = {name: TaskQueue(tmp_path / "tasks.db", name) for name in ("a", "b")}
    for queue in by_name.values():
        queue.create()
    return by_name


def ask(queues: dict[str, TaskQueue], method: str, path: str, **request: Any) -> httpx.Response:
    app = application(FastAPI(), SessionAuth("secret", "session"), None, queues, lambda _: None)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=KEY) as client:
            return await client.request(method, path, **request)

    return asyncio.run(main())


def test_tasks_are_added_counted_and_ended(queues: dict[str, TaskQueue]) -> None:
    tasks = [{"prompt": "1 + 1?"}, {"prompt": "ü"}]
    assert ask(queues, "POST", "/tasks", json={"taskset": "a", "tasks": tasks}).json() == {"added": 2}
    assert ask(queues, "POST", "/tasks/end", json={"taskset": "a"}).json() == {"tasks": 2}
    assert ask(queues, "POST", "/tasks/end", json={"taskset": "a"}).status_code == 409, "it has ended"
    counts = {"a": {"tasks": 2, "ended": True}, "b": {"tasks": 0, "ended": False}}
    assert ask(queues, "GET", "/tasks").json() == counts
    assert ask({"a": queues["a"]}, "POST", "/tasks", json={"tasks": []}).status_code == 409, "has ended"
    assert ask({"b": queues["b"]}, "POST", "/tasks", json={"tasks": tasks}).json() == {"added": 2}, "the only one"


@pytest.mark.parametrize("path", ["/tasks", "/tasks/end", "/sessions", "/feedback", "/sessions/x/v1/models"])
def test_an_agents_key_opens_its_session_alone(queues: dict[str, TaskQueue], path: str) -> None:
    response = ask(queues, "POST", path, json={}, headers={"authorization": "Bearer session"})
    assert response.status_code == (404 if path.endswith("models") else 401)
    assert all(queue.count() == (0, False) for queue in queues.values())


@pytest.mark.parametrize(
    ("request_args", "status", "code", "param"),
    [
        ({"headers": {"authorization": "Bearer wrong"}}, 401, "invalid_api_key", None),
        ({"json": {"tasks": []}}, 404, "taskset_not_found", "taskset"),
        ({"json": {"taskset": "c", "tasks": []}}, 404, "taskset_not_found", "taskset"),
        ({"json": {"taskset": "a", "tasks": {}}}, 400, "invalid_value", "tasks"),
        ({"json": {"taskset": "a", "tasks": [{"x": 1}, 2]}}, 400, "invalid_value", "tasks.1"),
        ({"content": '{"taskset": "a", "tasks": [{"x": "\\ud83d"}]}'}, 400, "invalid_tasks", "tasks"),
        ({"json": {"taskset": "a", "tasks": [{"x": 1}], "end": True}}, 400, "unknown_parameter", "end"),
        ({"json": []}, 400, "invalid_value", None),
        ({"content": "{"}, 400, "invalid_json", None),
    ],
)
def test_what_cannot_be_added_is_refused(
    queues: dict[str, TaskQueue], request_args: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    response = ask(queues, "POST", "/tasks", **request_args)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert all(queue.count() == (0, False) for queue in queues.values())
