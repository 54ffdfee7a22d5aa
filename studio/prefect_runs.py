"""Prefect's part of Studio: its flow runs and actions on them, without a cache. Each function raises the errors in
`tasks.retries.api_faults` if the API is away."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelling, Scheduled

from tasks.prefect_api import api_client

PREFIX = re.compile(r"^Flow run encountered an exception: (?:(?:Config|Trinity)Error: )?")
"""Prefect's prefix of an error's message; errors written for users do not need their class."""
MOST_RUNS = 200
SOON = timedelta(minutes=1)
"""Scheduled runs appear at most this long before their start."""


@dataclass(frozen=True, slots=True)
class FlowRunSeen:
    """A flow run as Prefect reports it."""

    id: str
    title: str
    flow: str
    kind: str
    message: str = ""
    began: datetime | None = None
    ended: datetime | None = None
    deployment: str = ""
    """Its deployment's id; empty if a command started it."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    """`project`, `name` and `stage`, once its configuration has been read."""


def recent_runs(api_url: str) -> list[FlowRunSeen]:
    """Return the newest flow runs first; after them the parts of flow runs, which may have the same name."""
    until = FlowRunFilter.model_validate({"expected_start_time": {"before_": datetime.now(UTC) + SOON}})
    newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
    with api_client(api_url) as client:
        flow_runs = client.read_flow_runs(flow_run_filter=until, sort=newest_first, limit=MOST_RUNS)
        flows = _flow_names(client)
    # A part of another run has no name before its configuration has been read.
    main_runs = [run for run in flow_runs if not run.parent_task_run_id or run.tags]
    return [_seen(run, flows) for run in sorted(main_runs, key=lambda run: bool(run.parent_task_run_id))]


def deployments(api_url: str, flow: str) -> dict[str, str]:
    """Return a flow's deployments whose runs take one `config`: id → `flow/name`."""
    with api_client(api_url) as client:
        flows = _flow_names(client)
        of_flow = [deployment for deployment in client.read_deployments() if flows.get(deployment.flow_id) == flow]
    fitting = [one for one in of_flow if "config" in (one.parameter_openapi_schema or {}).get("properties", {})]
    return {str(one.id): f"{flow}/{one.name}" for one in sorted(fitting, key=lambda one: one.name)}


def start_deployment(api_url: str, deployment: str, name: str, parameters: Mapping[str, Any]) -> str:
    """Schedule a deployment's run for `project/name` now and return its id. It keeps this name even if it is
    refused."""
    tags = [f"{kind}:{part}" for kind, part in zip(("project", "name"), name.split("/"), strict=True)]
    with api_client(api_url) as client:
        run = client.create_flow_run_from_deployment(
            UUID(deployment), name=name, parameters=dict(parameters), tags=tags
        )
    return str(run.id)


def cancel_run(api_url: str, run: str) -> bool:
    """Request the end of a run: training saves at its next step boundary. Return False if the run will never begin.

    Prefect decides: a run that a worker has taken has a process, even before it begins or between attempts.
    """
    with api_client(api_url) as client:
        state = client.read_flow_run(UUID(run)).state
        # Prefect would leave a paused run paused (3.7.7); a suspended one has no process, and is cancelled at once.
        is_paused = state is not None and state.name == "Paused"
        result: OrchestrationResult[Any] = client.set_flow_run_state(UUID(run), Cancelling(), force=is_paused)
    return result.state is None or not result.state.is_cancelled()


def retry_run(api_url: str, run: str) -> None:
    """Let a worker run a deployment's run again; it resumes from its latest checkpoint."""
    with api_client(api_url) as client:
        client.set_flow_run_state(UUID(run), Scheduled(message="Retried in Studio"), force=True)


def _flow_names(client: SyncPrefectClient) -> dict[Any, str]:
    return {flow.id: flow.name for flow in client.read_flows()}


def _seen(run: FlowRun, flows: Mapping[Any, str]) -> FlowRunSeen:
    state = run.state
    tags = dict(tag.split(":", 1) for tag in run.tags if ":" in tag)
    return FlowRunSeen(
        id=str(run.id),
        title=run.name,
        flow=flows.get(run.flow_id, ""),
        kind=state.type.value if state else "",
        message=PREFIX.sub("", state.message or "") if state else "",
        began=run.start_time,
        ended=run.end_time,
        deployment=str(run.deployment_id or ""),
        parameters=run.parameters,
        tags=tags,
    )
