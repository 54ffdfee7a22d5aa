"""Studio's side of a real Prefect API: what it lists, starts, cancels and retries, and the links that lead to it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from studio.prefect_runs import cancel_run, places, recent_runs, retry_run, start_deployment
from studio.runs import find_runs
from tasks.prefect_api import api_client
from trinity_core.exchange.tracking.run_record import RunState

pytestmark = pytest.mark.slow
SCHEMA = {"type": "object", "properties": {"config": {"type": "string"}, "overrides": {"type": "array"}}}


def deployed(client: Any, name: str, schema: dict[str, Any], flow: str = "studio_rft", **more: Any) -> Any:
    """A deployment of a flow that only these tests have."""
    flow_id = client.create_flow_from_name(flow)
    more |= {"parameter_openapi_schema": schema, "enforce_parameter_schema": False}
    return client.create_deployment(flow_id, name=name, **more)


def test_deployments_that_differ_in_their_parameters_are_one_place(prefect_api: str, tmp_path: Path) -> None:
    """The one whose file is most like the draft is taken; none of its own parameters stay in the run."""
    model = {"model_path": {"type": "string", "default": ""}, "lr": {"type": "number", "default": None}}
    schema = {"type": "object", "properties": SCHEMA["properties"] | model}
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f"project: {name}\nseed: 1\n")
    with api_client(prefect_api) as client:
        ids = {
            name: str(deployed(client, name, schema, "studio_places", parameters=parameters))
            for name, parameters in (
                ("a", {"config": "a.yaml", "model_path": "org/a"}), ("b", {"config": "b.yaml", "model_path": "org/b"}),
                ("lr", {"config": "b.yaml", "lr": 0.1}),  # a parameter that cannot be taken back
            )
        }  # fmt: skip
        deployed(client, "limited", schema, "studio_places", parameters={"config": "a.yaml"}, concurrency_limit=1)
        for name in ("a", "b"):
            draft = f"project: {name}\nname: mine\nseed: 1\n"
            [place] = places(prefect_api, "studio_places", draft, tmp_path)
            assert (place.deployment, place.name) == (ids[name], f"studio_places/{name}")
        started = start_deployment(prefect_api, ids["b"], "studio/places", {"config": "my.yaml"})
        assert client.read_flow_run(UUID(started)).parameters == {"config": "my.yaml", "model_path": ""}
        client.delete_flow_run(UUID(started))


def test_runs_are_started_listed_cancelled_and_retried(prefect_api: str, tmp_path: Path) -> None:
    from prefect import flow, task
    from prefect.states import AwaitingRetry, Cancelled, Cancelling, Failed, Paused, Pending, Running, Suspended

    def nothing() -> None: ...

    with api_client(prefect_api) as client:
        ours = str(deployed(client, "one", SCHEMA))
        deployed(client, "several", {"type": "object", "properties": {"configs": {"type": "array"}}})
        assert [place.deployment for place in places(prefect_api, "studio_rft", "", tmp_path)] == [ours], (
            "the other one takes no single configuration"
        )

        started = start_deployment(prefect_api, ours, "studio/one", {"config": "my.yaml", "overrides": ["seed=1"]})
        assert {"project:studio", "name:one"} <= {*client.read_flow_run(UUID(started)).tags}
        later = datetime.now(UTC) + timedelta(hours=2)
        client.create_flow_run_from_deployment(UUID(ours), name="by a schedule", state=_scheduled(later))
        for state in (Pending(), Running()):
            client.set_flow_run_state(UUID(started), state, force=True)
        tags = ["project:studio", "name:one_sft", "stage:sft"]
        part = client.create_flow_run(flow(nothing, name="studio_sft"), state=Running(), tags=tags)
        stands_for = client.create_task_run(task(nothing), UUID(started), dynamic_key="0").id
        client.create_flow_run(flow(nothing, name="studio_nameless"), parent_task_run_id=stands_for, state=Running())

        seen = [run for run in recent_runs(prefect_api) if run.flow.startswith("studio_")]
        assert {(run.id, run.flow, run.kind) for run in seen} == {
            (started, "studio_rft", "RUNNING"),
            (str(part.id), "studio_sft", "RUNNING"),
        }
        by_flow = {run.flow: run for run in seen}
        assert dict(by_flow["studio_rft"].parameters) == {"config": "my.yaml", "overrides": ["seed=1"]}
        assert by_flow["studio_sft"].tags == {"project": "studio", "name": "one_sft", "stage": "sft"}
        assert {run.name for run in find_runs(tmp_path, seen)} == {"studio/one", "studio/one_sft"}

        assert cancel_run(prefect_api, started)
        assert client.read_flow_run(UUID(started)).state.type.value == "CANCELLING"
        client.set_flow_run_state(UUID(started), Cancelled(), force=True)
        retry_run(prefect_api, started)
        again = next(run for run in recent_runs(prefect_api) if run.id == started)
        assert find_runs(tmp_path, [again])[0].state is RunState.WAITING
        assert not cancel_run(prefect_api, started)
        assert client.read_flow_run(UUID(started)).state.type.value == "CANCELLED"
        for state in (Pending(), AwaitingRetry(), Paused(timeout_seconds=60)):
            client.set_flow_run_state(UUID(started), state, force=True)
            client.update_flow_run(UUID(started), infrastructure_pid="1")
            assert cancel_run(prefect_api, started), "it has a process"
            assert client.read_flow_run(UUID(started)).state.type.value == "CANCELLING"
        client.set_flow_run_state(UUID(started), Paused(timeout_seconds=60), force=True)
        client.set_flow_run_state(UUID(started), Cancelling())
        assert client.read_flow_run(UUID(started)).state.type.value == "CANCELLING", "by `prefect flow-run cancel`"
        client.set_flow_run_state(UUID(started), Suspended(timeout_seconds=60), force=True)
        assert not cancel_run(prefect_api, started), "its process has ended"
        assert client.read_flow_run(UUID(started)).state.type.value == "CANCELLED"
        refused = "Flow run encountered an exception: ConfigError: The configuration has 1 problem"
        client.set_flow_run_state(part.id, Failed(message=refused), force=True)
        assert {run.message for run in recent_runs(prefect_api) if run.id == str(part.id)} == {
            "The configuration has 1 problem"
        }


def _scheduled(at: datetime) -> Any:
    from prefect.states import Scheduled

    return Scheduled(scheduled_time=at)
