"""The server that agrees to everything answers as Prefect's client expects."""

from __future__ import annotations

from uuid import uuid4

from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.states import Completed, to_state_create

from flows.local.agreeable import AgreeableServer


def test_what_is_made_and_changed_is_known() -> None:
    server = AgreeableServer()
    status, made = server.answer("POST", "/api/flow_runs", {"flow_id": str(uuid4()), "name": None, "tags": ["a"]})
    run = FlowRun.model_validate(made)
    assert status == 201 and run.name and run.tags == ["a"]
    assert server.answer("PATCH", f"/api/flow_runs/{run.id}", {"name": "p/n"}) == (204, None)
    state = to_state_create(Completed()).model_dump(mode="json")
    _, answer = server.answer("POST", f"/api/flow_runs/{run.id}/set_state", {"state": state, "force": False})
    assert OrchestrationResult.model_validate(answer).status == SetStateStatus.ACCEPT
    known = FlowRun.model_validate(server.answer("GET", f"/api/flow_runs/{run.id}", None)[1])
    assert known.name == "p/n" and known.state is not None and known.state.is_completed()


def test_what_was_made_before_is_taken_as_known() -> None:
    server, name = AgreeableServer(), str(uuid4())
    for kind, path in ((FlowRun, "flow_runs"), (TaskRun, "task_runs"), (Artifact, "artifacts")):
        assert str(kind.model_validate(server.answer("GET", f"/api/{path}/{name}", None)[1]).id) == name
    assert server.answer("POST", "/api/flow_runs/filter", {"limit": 1}) == (200, [])
    assert server.answer("POST", "/api/logs", [{"message": "hello"}])[0] == 201
