"""MLflow: by default a SQLite file next to the checkpoints, without a server.

A pipeline is a parent run and each stage a child. The run's id is kept in `<job_dir>/monitor/mlflow.json`, so that a
resumed run continues the same MLflow run; a copy of the folder begins its own. Every checkpoint is a version of one
registered model, without a copy of its weights; the best by eval has the alias `best`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import networked, private_folder, read_json, write_json
from trinity_core.base.runlock import one_at_a_time
from trinity_core.config.secrets import without_password, without_secrets
from trinity_core.exchange.tracking.metrics_file import MetricLine
from trinity_core.exchange.tracking.mlflow_facts import (
    DESCRIPTION,
    FIRST,
    LONGEST_KEY,
    allowed_name,
    dataset_inputs,
    description,
    metric_names,
    parameters,
    registered_name,
    send_trace,
    shortened,
    steps_before,
)
from trinity_core.exchange.tracking.mlflow_root import (
    LOCK,
    LOCK_SECONDS,
    artifact_folder,
    default_uri,
    follow_moved_root,
    make_database,
    mlflow_address,
)
from trinity_core.exchange.tracking.writers import (
    MONITORS,
    RunInfo,
    RunOutcome,
    Writer,
    full_names,
    is_away,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    from trinity_core.exchange.tracking.rollouts import SampledRollout

log = logging.getLogger(__name__)

BEST = "best"
KIND, TRAINING = "mlflow.experimentKind", "custom_model_development"
"""Tag of the experiment that makes MLflow's page open with runs and charts. Without it, MLflow infers agent evaluations
from our sampled rollouts."""
BATCH = 1000
PARAMS_BATCH = 100
STARTS = "trinity.starts"
"""Tag with the number of starts of the run that had different settings. Absent: one."""
HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Default environment of MLflow's client, whose own defaults are 7 attempts of 120 s. The forwarder retries anyway."""
VALUE_LENGTH = 5000
STATUS = {RunOutcome.PAUSED: "SCHEDULED", RunOutcome.CANCELLED: "KILLED"}  # others have the outcome's name
_held: set[Path] = set()
"""Job dirs of the pipelines running in this process."""


def fault_of(uri: str | None, checkpoint_root_dir: Path | str) -> str:
    """Return why this store (None: the one next to the checkpoints) must not be used, or ""."""
    file = _database(uri or default_uri(checkpoint_root_dir))
    if not file or not (kind := networked(file)):
        return ""
    return (
        f"MLflow's SQLite file would be on a network file system ({kind}: {file}), where SQLite may lose data. "
        "Write the address of an MLflow server, http://host:5000, or, if the whole run is on this machine, "
        "sqlite:////folder/mlflow.db on a local disk. With monitor.monitor_type tensorboard there is no database."
    )


def _database(uri: str) -> Path | None:
    """Return the file of a SQLite store."""
    found = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(found[1]) if found else None


def serve_command(uri: str, checkpoint_root_dir: Path) -> list[str]:
    """Return the command that serves a SQLite store on this machine, to those who have the folder's key."""
    server = "trinity_core.exchange.tracking.mlflow_server"
    return [sys.executable, "-m", server, uri, str(artifact_folder(checkpoint_root_dir))]


@MONITORS.register("mlflow")
class MlflowWriter(Writer):
    """One MLflow run. Opening it creates the store, the experiment and the run if they do not exist."""

    closes_before_files = True
    takes_traces = True

    def __init__(
        self,
        info: RunInfo,
        checkpoint_root_dir: Path,
        uri: str | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException
        from sqlalchemy.exc import SQLAlchemyError

        self.faults: tuple[type[Exception], ...] = (MlflowException, RequestException, SQLAlchemyError, OSError)
        self._info = info
        self._root = checkpoint_root_dir.absolute()
        self.uri = uri or default_uri(self._root)
        self._name = registered_name(f"{info.project}.{info.name}")
        self._client = open_client(self.uri, username, password, self._root)
        self._experiment = open_experiment(self._client, self.uri, info.project, self._root)
        self._begun: dict[Path, str] = {}
        """Job dir → id of each run that this writer created or reopened."""
        self._ends = uuid4().hex[:12]
        """Identifies this writer in the notes of runs that it opened last; it is the one to end them."""
        self._pipeline = self._open_run(info.parent_dir, info.parent_dir.name, None) if info.parent_dir else None
        self._before = steps_before(info.parent_dir, info.tags.get("stage", "")) if info.parent_dir else 0
        """Train steps of the pipeline's stages before this one."""
        self.run_id = self._open_run(info.job_dir, info.name, self._pipeline)
        self._system = self._watch_machine() if info.job_dir in self._begun else None

    @property
    def link(self) -> str:
        """The run's page on a server, including `trinity up`'s; otherwise the command that serves the file.

        Passwords are masked.
        """
        uri = mlflow_address(self._root, self.uri) or without_password(self.uri)
        if uri.startswith(("http://", "https://")):
            return run_page(uri, self._experiment, self.run_id)
        return shlex.join(serve_command(uri, self._root))

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Log metrics, and the most important ones and evaluations also in the pipeline's run, by the steps of all its
        stages: MLflow's page opens with that run alone, which has the evaluation of the model before training."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(line.time * 1000), line.step)
            for line in lines
            for full_name, value in full_names(line).items()
            if math.isfinite(value)
            for name in metric_names(full_name)
        ]
        self._log_metrics(self.run_id, metrics)
        if self._pipeline:
            first = [metric for metric in metrics if metric.key.startswith((f"{FIRST}/", "eval/"))]
            of_all = [Metric(one.key, one.value, one.timestamp, self._before + one.step) for one in first]
            self._log_metrics(self._pipeline, of_all)

    def _log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Log up to a thousand numbers per `log_batch` (4,500 a second on SQLite, against 61 one by one)."""
        for begin in range(0, len(metrics), BATCH):
            self._client.log_batch(run_id, metrics=metrics[begin : begin + BATCH])

    def artifact(self, path: Path, folder: str = "") -> None:
        self._client.log_artifact(self.run_id, str(path), folder or None)

    def traces(self, source: str, step: int, rollouts: Sequence[SampledRollout], time_ns: int) -> None:
        for index, rollout in enumerate(rollouts):
            send_trace(self.uri, self._experiment, self.run_id, f"{source} step {step} #{index}", rollout, time_ns)

    def checkpoint(self, step: int, path: Path) -> None:
        """Register a checkpoint as a model version whose source is the checkpoint's own folder."""
        if step in self._versions():
            return
        tags = {"mlflow.model.isExternal": "true", "step": str(step)}
        model = self._client.create_logged_model(
            self._experiment, f"step_{step}", self.run_id, tags, {"step": str(step), "path": str(path)}, "checkpoint"
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.create_model_version(
            self._registered, path.absolute().as_uri(), self.run_id, tags={"step": str(step)}, model_id=model.model_id
        )

    def score(self, step: int, value: float) -> bool:
        if (version := self._versions().get(step)) is None:
            return False
        score = f"{value:.6g}"
        if version.tags.get("score") != score:
            self._client.log_metric(self.run_id, "eval/score", value, step=step, model_id=version.model_id)
            self._client.set_model_version_tag(self._registered, version.version, "score", score)
        return True

    def best(self, step: int) -> None:
        self._client.set_registered_model_alias(self._registered, BEST, self._versions()[step].version)

    def close(self, outcome: RunOutcome) -> None:
        """Mark the runs that this writer was the last to begin as ended; they can be reopened.

        A stage that runs alone also ends the pipeline's run; within a pipeline `close_parent` does.
        """
        if self._system is not None:
            self._system.finish()
        for job_dir, run_id in self._begun.items():
            if job_dir not in _held and _noted(job_dir).get("ends") == self._ends:
                self._client.set_terminated(run_id, STATUS.get(outcome, outcome.name))

    def _watch_machine(self) -> SystemMetricsMonitor | None:
        """Log CPU, memory, disk, network and GPUs of this machine every 10 s as `system/…`, unless disabled.

        MLflow's own thread does so until the run ends or the store is away.
        """
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.is_set() and not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            return None
        monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
        monitor.start()
        return monitor

    @cached_property
    def _registered(self) -> str:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self._name, tags={"project": self._info.project})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self._name

    def _versions(self) -> dict[int, ModelVersion]:
        """Return step → model version of this run's checkpoints registered so far by any flow.

        Versions that the user registered from the run are ignored.
        """
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        return {
            int(version.tags["step"]): version
            for version in versions
            if version.name == self._name and "step" in version.tags
        }

    def _open_run(self, job_dir: Path, name: str, parent: str | None) -> str:
        """Open the run whose id is in `job_dir`, reopening it unless `keeps_status`, or create one with the parameters.

        Explorers and trainer of a job, which may start at the same time, share a run.
        """
        is_parent = job_dir != self._info.job_dir
        with one_at_a_time(_note(job_dir).with_name(LOCK), LOCK_SECONDS):
            note = _noted(job_dir)
            run_id: str = note.get("run_id", "")
            if run_id and (is_parent or self._info.is_own(note)) and _has_run(self._client, job_dir, run_id):
                note = _kept_at(self.uri, job_dir, note)
                self._client.set_tag(run_id, DESCRIPTION, description(job_dir))
                if not self._info.keeps_status:
                    self._client.update_run(run_id, status="RUNNING")
                    if not is_parent and self._info.config.get("mode") != "explore":
                        self._log_changes(run_id)
                    self._begin(job_dir, note)
                return run_id
            tags = {"project": self._info.project, "job_dir": str(job_dir), DESCRIPTION: description(job_dir)}
            tags |= {"stage": "pipeline"} if is_parent else self._info.tags
            tags |= {"mlflow.parentRunId": parent} if parent else {}
            run_name = shortened(name, LONGEST_KEY)
            run_id = self._client.create_run(self._experiment, tags=tags, run_name=run_name).info.run_id
            if not is_parent:  # a pipeline's settings are those of its stages
                self._log_params(run_id, parameters(self._info.config))
            self._begin(job_dir, {"run_id": run_id, "uri": self.uri, "experiment_id": self._experiment})
            if not is_parent and (datasets := dataset_inputs(self._info.config)):
                self._client.log_inputs(run_id, datasets=datasets)
            return run_id

    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        rows = (Param(name, value[:VALUE_LENGTH]) for name, value in params.items())
        while batch := list(islice(rows, PARAMS_BATCH)):
            self._client.log_batch(run_id, params=batch)

    def _log_changes(self, run_id: str) -> None:
        """Add settings that differ from earlier starts as `start_<n>.<name>`, because MLflow parameters are immutable.

        Explorers that share the trainer's run add nothing: each has its own settings.
        """
        run, now = self._client.get_run(run_id), parameters(self._info.config)
        starts = int(run.data.tags.get(STARTS, "1"))
        logged = dict(run.data.params)
        for start in range(2, starts + 1):
            start_prefix = f"start_{start}."
            logged |= {
                name.removeprefix(start_prefix): v
                for name, v in run.data.params.items()
                if name.startswith(start_prefix)
            }
        changed = {name: value for name, value in now.items() if logged.get(name) != value[:VALUE_LENGTH]}
        if changed:
            prefix = f"start_{starts + 1}."
            self._log_params(run_id, {allowed_name(prefix + name): value for name, value in changed.items()})
            self._client.set_tag(run_id, STARTS, str(starts + 1))
        for name, value in self._info.tags.items():
            self._client.set_tag(run_id, name, value)

    def _begin(self, job_dir: Path, note: Mapping[str, Any]) -> None:
        """Record that the run ends with this writer, unless another one reopens it meanwhile."""
        identity = {"identity": self._info.identity} if job_dir == self._info.job_dir and self._info.identity else {}
        write_json(
            _note(job_dir), {**note, **identity, "ends": self._ends}, mode=0o600
        )  # the address may contain a password
        self._begun[job_dir] = note["run_id"]


def keep_parent_open(job_dir: Path) -> None:
    """Keep the run of the pipeline in `job_dir` open until `close_parent`, beyond the end of its stages."""
    _held.add(job_dir)


def run_page(server: str, experiment: str, run: str) -> str:
    """Return the address of a run's charts.

    MLflow's page shows training runs only if the address says so; otherwise it shows agents and their evaluations. The
    experiment's kind matters for other programs.
    """
    return f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{run}/model-metrics?workflowType=machine_learning"


def served_run(job_dir: Path) -> str:
    """Return the address of a job's charts in the MLflow of `trinity up`, or ""."""
    note = _noted(job_dir)
    server = mlflow_address(job_dir.parent.parent, note.get("uri", ""))
    return run_page(server, note["experiment_id"], note["run_id"]) if server else ""


def open_experiment(client: MlflowClient, uri: str, project: str, root: Path) -> str:
    """Return the id of a project's experiment, which is created if needed, in a local store with artifacts where
    `trinity up` serves them. Raises TrinityError if it was deleted in MLflow."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(project)
    if experiment is None:
        local = None if uri.startswith("http") else private_folder(artifact_folder(root)).as_uri()
        try:
            return client.create_experiment(project, local, {KIND: TRAINING})
        except MlflowException as error:  # another run of the project created it first
            experiment = client.get_experiment_by_name(project)
            if experiment is None:
                raise TrinityError(f"MLflow cannot make the experiment {project!r}: {error}") from error
    if experiment.lifecycle_stage != "active":
        store = shlex.quote(without_password(uri))
        raise TrinityError(
            f"The experiment {project!r} was deleted in MLflow. Bring it back by "
            f"`MLFLOW_TRACKING_URI={store} mlflow experiments restore -x {experiment.experiment_id}`, or give the run "
            "another `project`.",
            key="project",
        )
    if experiment.tags.get(KIND, "inferred").endswith("inferred"):
        client.set_experiment_tag(experiment.experiment_id, KIND, TRAINING)
    return experiment.experiment_id


def share_experiment(project: str, root: Path) -> None:
    """Create a project's experiment in the default store of `root`, for runs whose folders are elsewhere."""
    uri = default_uri(private_folder(root))
    open_experiment(open_client(uri, None, None, root), uri, project, root)


def describe_runs(checkpoint_root_dir: Path) -> None:
    """Write the addresses of `trinity up` into the default store: the descriptions of runs."""
    uri = default_uri(checkpoint_root_dir)
    notes = checkpoint_root_dir.glob("*/*/monitor/mlflow.json")
    job_dirs = [note.parent.parent for note in notes if os.access(note, os.R_OK)]  # in a shared root, ours
    noted = {job_dir: note for job_dir in job_dirs if (note := _noted(job_dir)).get("run_id")}
    if not noted or fault_of(uri, checkpoint_root_dir):
        return
    try:
        client = open_client(uri, None, None, checkpoint_root_dir)
        for job_dir, note in noted.items():
            if _has_run(client, job_dir, note["run_id"]):
                _kept_at(uri, job_dir, note)
                client.set_tag(note["run_id"], DESCRIPTION, description(job_dir))
    except Exception as error:
        if not (is_away(error) or isinstance(error, TrinityError | TransientFault)):
            raise
        log.warning("the descriptions of runs in MLflow keep their links: %s", error)


def close_parent(job_dir: Path, outcome: RunOutcome, scores: Mapping[str, float | None] | None = None) -> None:
    """Mark a pipeline's run, if it has one, as ended, with the scores of its first model and of each stage, in order
    and each at the train steps up to it.

    If it finished, its summary is added, provided the artifact store takes it.
    """
    _held.discard(job_dir)
    if not (note := _noted(job_dir)):
        return
    try:
        client = open_client(note["uri"], None, None, job_dir.parent.parent)
        following = [*(scores or {}), ""][1:]
        for score, stage in zip((scores or {}).values(), following, strict=True):
            if score is not None:
                client.log_metric(note["run_id"], "eval/score", score, step=steps_before(job_dir, stage))
        client.set_terminated(note["run_id"], STATUS.get(outcome, outcome.name))
    except Exception as error:
        if not is_away(error):
            raise
        log.warning("the pipeline's run in MLflow stays open, because MLflow does not answer: %s", error)
        return
    if outcome is RunOutcome.FINISHED and (summary := job_dir / "summary.json").is_file():
        try:
            client.log_artifact(note["run_id"], str(summary))
        except Exception as error:  # noqa: BLE001 - each kind of artifact store has errors of its own
            log.warning("the pipeline's run in MLflow has no summary.json: %s", error)


def _has_run(client: MlflowClient, job_dir: Path, run_id: str) -> bool:
    """True if the store has the run recorded in `job_dir`, it is not deleted, and it belongs to that folder.

    A copied folder records the original's run, which belongs to the original while that exists in its place.
    """
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if is_away(error):
            raise
        return False
    began = Path(run.data.tags.get("job_dir", job_dir))
    is_noted_there = os.access(_note(began), os.R_OK) and _noted(began).get("run_id") == run_id
    return run.info.lifecycle_stage == "active" and (not is_noted_there or began.samefile(job_dir))


def _note(job_dir: Path) -> Path:
    return job_dir / "monitor" / "mlflow.json"


def _noted(job_dir: Path) -> dict[str, Any]:
    return read_json(_note(job_dir))


def run_note(job_dir: Path) -> dict[str, Any]:
    """Return the job's MLflow run (`run_id`, `uri`, `experiment_id`) with secrets masked; empty if it has none."""
    return without_secrets(_noted(job_dir))


def _kept_at(uri: str, job_dir: Path, note: dict[str, Any]) -> dict[str, Any]:
    """Return the note of a run that is in the store at `uri`: the store may have been moved since."""
    if note.get("uri") != uri:
        note = note | {"uri": uri}
        write_json(_note(job_dir), note, mode=0o600)
    return note


def open_client(uri: str, username: str | None, password: str | None, root: Path) -> MlflowClient:
    """Return a client. A new SQLite store is created under a lock in `root`, because several runs may open it at once.

    Raises TrinityError if the store does not open, TransientFault if another process holds the lock.
    """
    for value, variable in ((username, "MLFLOW_TRACKING_USERNAME"), (password, "MLFLOW_TRACKING_PASSWORD")):
        if value:
            os.environ[variable] = value
    for variable in ("MLFLOW_ACTIVE_MODEL_ID", "_MLFLOW_ACTIVE_MODEL_ID"):
        os.environ.pop(variable, None)  # of a job around this one: MLflow would count our metrics as that model's
    for setting, value in HTTP.items():
        os.environ.setdefault(setting, value)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        with one_at_a_time(root / LOCK, LOCK_SECONDS):
            if file := _database(uri):
                with suppress(OSError):  # MLflow says why it cannot be opened
                    make_database(file)
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
            if uri == default_uri(root):
                follow_moved_root(root.absolute())
    except MlflowException as error:
        reason = without_password(f"MLflow does not open at {uri}: {error}".rstrip(". "))
        raise TrinityError(f"{reason}. Set monitor.monitor_args.uri.", key="monitor.monitor_args.uri") from None
    return client
