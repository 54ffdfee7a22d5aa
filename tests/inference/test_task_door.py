"""Adding tasks over HTTP, with the run's key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from trinity_core.data.task_queue import TaskQueue
from trinity_core.inference.openai_api.asgi import answer
from trinity_core.inference.openai_api.gate import Gate
from trinity_core.inference.openai_api.task_door import TaskDoor

KEY = {"authorization": "Bearer secret"}


@pytest.fixture
def queues(tmp_path: Path) -> dict[str, TaskQueue]:
    made = {name: TaskQueue(tmp_path / "tasks.db", name) for name in ("a", "b")}
    for queue in made.values():
        queue.create()
    return made


def ask(queues: dict[str, TaskQueue], method: str, path: str, **given: Any) -> httpx.Response:
    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 200, "behind")

    async def main() -> httpx.Response:
        gate = Gate(behind, "secret")
        transport = httpx.ASGITransport(TaskDoor(gate, gate, queues))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=KEY) as client:
            return await client.request(method, path, **given)

    return asyncio.run(main())


def test_tasks_are_added_counted_and_ended(queues: dict[str, TaskQueue]) -> None:
    tasks = [{"prompt": "1 + 1?"}, {"prompt": "ü"}]
    assert ask(queues, "POST", "/tasks", json={"taskset": "a", "tasks": tasks}).json() == {"added": 2}
    assert ask(queues, "POST", "/tasks/end", json={"taskset": "a"}).json() == {"tasks": 2}
    counts = {"a": {"tasks": 2, "ended": True}, "b": {"tasks": 0, "ended": False}}
    assert ask(queues, "GET", "/tasks").json() == counts
    assert ask({"a": queues["a"]}, "POST", "/tasks", json={"tasks": []}).status_code == 409, "has ended"
    assert ask({"b": queues["b"]}, "POST", "/tasks", json={"tasks": tasks}).json() == {"added": 2}, "the only one"
    assert ask(queues, "GET", "/v1/models").json() == "behind"


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        ({"headers": {"authorization": "Bearer wrong"}}, 401, "Incorrect API key"),
        ({"json": {"tasks": []}}, 404, "give one of a, b"),
        ({"json": {"taskset": "c", "tasks": []}}, 404, "give one of a, b"),
        ({"json": {"taskset": "a", "tasks": {}}}, 400, "list of objects"),
        ({"json": {"taskset": "a", "tasks": [{"x": 1}, 2]}}, 400, "list of objects"),
        ({"content": '{"taskset": "a", "tasks": [{"x": "\\ud83d"}]}'}, 400, "task 0 holds"),
        ({"json": []}, 400, "give an object"),
        ({"content": "{"}, 400, "no JSON"),
    ],
)
def test_what_cannot_be_added_is_refused(
    queues: dict[str, TaskQueue], given: dict[str, Any], status: int, told: str
) -> None:
    response = ask(queues, "POST", "/tasks", **given)
    assert response.status_code == status and told in response.text
    assert all(queue.count() == (0, False) for queue in queues.values())
