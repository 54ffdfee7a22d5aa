"""Prefect's part of Studio: its flow runs and actions on them, without a cache. Each function raises the errors in
`tasks.retries.api_faults` if the API is away."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import OrchestrationResult
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import DeploymentStatus, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
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


class Place(NamedTuple):
    """A deployment that stands for the work pool in which it runs a flow."""

    deployment: str
    """Its id."""
    name: str
    caption: str


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


def places(api_url: str, flow: str, text: str, root: Path) -> list[Place]:
    """Return where workers run a flow that takes one `config`: each work pool, queue and job once.

    Deployments of one place differ in parameters that a start replaces. Of these the one whose file below `root` has
    most lines in common with the configuration `text` is taken, because its runs get its tags; one that limits its runs
    only if there is no other.
    """
    with api_client(api_url) as client:
        flows = _flow_names(client)
        of_flow = [deployment for deployment in client.read_deployments() if flows.get(deployment.flow_id) == flow]
    lines, by_job = {*text.splitlines()}, dict[str, tuple[tuple[bool, int], Place]]()
    for one in sorted(of_flow, key=lambda one: one.name):
        usual = _defaults(one)
        if "config" not in usual or any(usual.get(key) is None for key in {*one.parameters} - {"config", "overrides"}):
            continue  # it takes several files, or has a parameter that a start cannot set back
        file = root / str(one.parameters.get("config") or "")
        alike = len(lines & {*file.read_text(errors="replace").splitlines()}) if file.is_file() else 0
        job = str((one.work_pool_name, one.work_queue_name, one.job_variables, one.pull_steps))
        waits = "" if one.status is DeploymentStatus.READY else " **No worker is running: the run would wait for one.**"
        about = f"A worker of the pool `{one.work_pool_name}` runs this file, and starts it again after a fault. "
        about += f"Prefect lists the run under the deployment `{flow}/{one.name}`.{waits}"
        place = Place(str(one.id), f"{flow}/{one.name}", about)
        rated = (one.global_concurrency_limit is None, alike), place
        by_job[job] = max(by_job.get(job, rated), rated, key=lambda rated: rated[0])
    return [place for _, place in by_job.values()]


def start_deployment(api_url: str, deployment: str, name: str, parameters: Mapping[str, Any]) -> str:
    """Schedule a deployment's run for `project/name` now and return its id. It keeps this name even if it is
    refused, and the flow's own defaults instead of the deployment's."""
    tags = [f"{kind}:{part}" for kind, part in zip(("project", "name"), name.split("/"), strict=True)]
    with api_client(api_url) as client:
        usual = _defaults(of_deployment := client.read_deployment(UUID(deployment)))
        filled = {key: usual[key] for key in of_deployment.parameters if usual.get(key) is not None} | dict(parameters)
        run = client.create_flow_run_from_deployment(UUID(deployment), name=name, parameters=filled, tags=tags)
    return str(run.id)


def cancel_run(api_url: str, run: str) -> bool:
    """Request the end of a run: training saves at its next step boundary. Return False if the run will never begin, as
    Prefect decides: a run that a worker has taken has a process, even before it begins or between attempts."""
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


def _defaults(deployment: DeploymentResponse) -> dict[str, Any]:
    """Return each parameter of a deployment's flow with the flow's own default, None without one."""
    properties = (deployment.parameter_openapi_schema or {}).get("properties", {})
    return {name: schema.get("default") for name, schema in properties.items()}


def _flow_names(client: SyncPrefectClient) -> dict[Any, str]:
    return {flow.id: flow.name for flow in client.read_flows()}


def _seen(run: FlowRun, flows: Mapping[Any, str]) -> FlowRunSeen:
    state = run.state
    tags = dict(tag.split(":", 1) for tag in run.tags if ":" in tag)
    message, kind = (PREFIX.sub("", state.message or ""), state.type.value) if state else ("", "")
    return FlowRunSeen(
        str(run.id), run.name, flows.get(run.flow_id, ""), kind, message, run.start_time, run.end_time,
        str(run.deployment_id or ""), run.parameters, tags,
    )  # fmt: skip
