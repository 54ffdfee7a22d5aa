"""MLflow's side of Studio: the runs of the store beside the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_core.tracking.mlflow_writer import CHAMPION, default_uri, page_note, registered_name
from trinity_core.tracking.writers import read_note

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

MOST_RUNS = 200


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as MLflow knows it."""

    id: str
    experiment: str
    project: str
    name: str
    status: str
    """`RUNNING`, `FINISHED`, `FAILED` …"""
    job_dir: Path
    began: datetime
    ended: datetime | None = None
    parent: str = ""
    """MLflow's id of the pipeline's run."""
    params: Mapping[str, str] = field(default_factory=dict)
    """The whole configuration under dotted names, secrets masked."""


def tracked_runs(checkpoints: Path) -> list[TrackedRun]:
    """The newest runs of the store beside these checkpoints, the newest first; none if there is no store yet."""
    client = open_store(checkpoints)
    if client is None:
        return []
    experiments = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(experiments, max_results=MOST_RUNS, order_by=["attributes.start_time DESC"])
    return [_tracked(run) for run in found if "job_dir" in run.data.tags]


def champion_step(checkpoints: Path, run: TrackedRun) -> int | None:
    """The step of the run's best checkpoint by eval score; None while no checkpoint has one."""
    from mlflow.exceptions import MlflowException

    client = open_store(checkpoints)
    if client is None:
        return None
    try:
        version = client.get_model_version_by_alias(registered_name(run.project, run.name), CHAMPION)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None
    return int(version.tags["step"])


def served_at(checkpoints: Path) -> str:
    """The address of MLflow's page if `trinity up` serves it; else empty."""
    return str(read_note(page_note(checkpoints)).get("url", ""))


def open_store(checkpoints: Path) -> MlflowClient | None:
    """A client of the store beside the checkpoints; None if there is none yet."""
    from mlflow import MlflowClient

    if not (checkpoints / "mlflow.db").exists():
        return None
    uri = served_at(checkpoints) or default_uri(checkpoints)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _tracked(run: Run) -> TrackedRun:
    tags, info = run.data.tags, run.info
    return TrackedRun(
        id=info.run_id,
        experiment=info.experiment_id,
        project=tags.get("project", ""),
        name=info.run_name or "",
        status=info.status,
        job_dir=Path(tags["job_dir"]),
        began=_time(info.start_time),
        ended=_time(info.end_time) if info.end_time else None,
        parent=tags.get("mlflow.parentRunId", ""),
        params=run.data.params,
    )


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
