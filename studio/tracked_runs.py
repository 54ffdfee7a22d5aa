"""MLflow's side of Studio: the runs of the store beside the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.page_notes import read_page_note
from trinity_core.tracking.mlflow_writer import CHAMPION, default_uri, open_client, registered_name

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
    """The step of the run's best checkpoint by eval score; None while no checkpoint is known to have one."""
    try:
        client = open_store(checkpoints)
        name = registered_name(run.project, run.name)
        return int(client.get_model_version_by_alias(name, CHAMPION).tags["step"]) if client is not None else None
    except store_faults():
        return None


def served_at(checkpoints: Path) -> str:
    """The address of MLflow's page if `trinity up` serves it; else empty."""
    return str(read_page_note(checkpoints, "mlflow").get("url", ""))


def open_store(checkpoints: Path) -> MlflowClient | None:
    """A client of the store beside the checkpoints; None if there is none yet. Raises as `open_client`."""
    return _client(checkpoints) if (checkpoints / "mlflow.db").exists() else None


def store_faults() -> tuple[type[Exception], ...]:
    """What the functions above raise while the store cannot be read."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, SQLAlchemyError, TrinityError, TransientFault, OSError


@lru_cache
def _client(checkpoints: Path) -> MlflowClient:
    return open_client(default_uri(checkpoints), None, None, checkpoints)


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
