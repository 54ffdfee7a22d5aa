"""The worker of `trinity up` and the runs of its work pool, as seen through Prefect's API and the process table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from flows.local.server import Process, client_environment, start_process
from tasks.prefect_api import api_client
from trinity_core.base.gate import server_key
from trinity_core.base.processes import still_running

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

POOL = "trinity"
WORKER_LIMIT = 4
"""Concurrent runs: explorer, a further explorer and trainer of an asynchronous run, and the sweep."""
END_SECONDS = 45.0
"""Time for a run to save and end: its trainer has 20 s, then Ray's processes end."""
CLOCK_SECONDS = 2.0
"""Tolerance between the database's clock and process start times."""
FREE_VARIABLES = r"TRINITY_\w+|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|HF_TOKEN|\w+_API_KEY"
"""Environment variables that a request may set: what configurations read. Many others, such as PATH, PYTHONPATH and
LD_PRELOAD, decide which programs run."""
_VALUE = {"type": ["string", "null"]}
_ENV = {"type": "object", "patternProperties": {f"^({FREE_VARIABLES})$": _VALUE}, "additionalProperties": False}
JOB: dict[str, Any] = {
    "job_configuration": {"command": None, "working_dir": None, "env": "{{ env }}"},
    "variables": {
        "type": "object",
        "properties": {"env": _ENV},
        "patternProperties": {rf"^env\.({FREE_VARIABLES})$": _VALUE},
        "additionalProperties": False,
    },
}
"""The pool's job template. A deployment or a run can set those variables, but neither the command nor the folder that a
worker runs it in."""
TAKEN: dict[str, Any] = {
    "operator": "or_",
    "type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]},
    "name": {"any_": ["AwaitingRetry", "Paused"]},
}
"""States of a run that a worker has taken and whose process exists, including paused (but not suspended) runs and runs
scheduled between two attempts."""


def worker_name(root: Path) -> str:
    """Return a worker name derived from its folder, because another folder's worker may use the same database."""
    return re.sub(r"[^\w.-]+", "-", str(root.absolute())).strip("-") or POOL


def start_worker(root: Path, api_url: str) -> Process:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--type", "process", "--install-policy", "never"]
    command += ["--pool", POOL, "--name", worker_name(root), "--limit", str(WORKER_LIMIT)]
    env = client_environment(api_url, root) | {"PREFECT_WORKER_QUERY_SECONDS": "3"}
    return Process.of("worker", start_process("worker", command, env, root).pid)


def make_pool(root: Path, api_url: str) -> None:
    """Create the work pool, whose runs are processes of this machine; unpause an existing one."""
    from prefect.client.schemas.actions import WorkPoolCreate

    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=JOB, is_paused=False)
    with api_client(api_url, server_key(root)) as client:
        client.create_work_pool(pool, overwrite=True)


def renew_template(root: Path, api_url: str) -> None:
    """Give an existing pool today's template: an earlier release's lets a request choose the command."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    with api_client(api_url, server_key(root)) as client:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=JOB))


@contextmanager
def pause_pool(client: SyncPrefectClient) -> Iterator[None]:
    """Within this context no worker takes new runs from the pool; scheduled runs stay scheduled."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    was_paused = client.read_work_pool(POOL).is_paused
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        yield
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=was_paused))


def pool_is_shared(client: SyncPrefectClient, root: Path) -> bool:
    """True if another folder's worker also takes runs from the pool: several folders may share a database."""
    from prefect.client.schemas.objects import WorkerStatus

    others = [worker for worker in client.read_workers_for_work_pool(POOL) if worker.name != worker_name(root)]
    return any(worker.status == WorkerStatus.ONLINE for worker in others)


def unfinished_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the pool's runs that a worker has taken and that have not ended."""
    return _runs(client, pool={"name": {"any_": [POOL]}}, state=TAKEN)


def crashed_runs(client: SyncPrefectClient, since: datetime) -> list[FlowRun]:
    """Return the pool's runs that are crashed and did so after `since`."""
    crashed = {"type": {"any_": ["CRASHED"]}}
    return _runs(client, pool={"name": {"any_": [POOL]}}, state=crashed, end_time={"after_": since})


def process_of(run: FlowRun) -> psutil.Process | Literal["another user's"] | None:
    """Return the process on this machine that executes a run, or None.

    Only its owner can inspect another user's process. A process that began after Prefect last heard of the run is not
    the run's: it has reused a process id.
    """
    try:
        process = psutil.Process(int(run.infrastructure_pid or ""))
        began = process.create_time()
    except (ValueError, psutil.Error):
        return None
    try:
        return process if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id) else None
    except psutil.AccessDenied:
        heard = run.updated.timestamp() if run.updated else began
        return None if began > heard + CLOCK_SECONDS else "another user's"
    except psutil.Error:
        return None


def is_gone(run: FlowRun) -> bool:
    begun = bool(run.infrastructure_pid) and run.state is not None and not run.state.is_pending()
    return begun and process_of(run) is None


def end_processes(runs: Sequence[FlowRun]) -> None:
    """Send SIGTERM to the processes of runs, which save and end, and wait for them."""
    processes = [process for run in runs if isinstance(process := process_of(run), psutil.Process)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    still_running(processes, END_SECONDS)


def mark_ended(client: SyncPrefectClient, runs: Sequence[FlowRun], state: str, message: str) -> None:
    """Set runs whose processes are gone, and their subflows, to `Cancelled` or `Crashed`.

    While they count as running they use up a deployment's `concurrency_limit`. A run that has ended in the meantime
    keeps its state, except that a worker records the end of a cancelled process, and of its subflows, as a crash.
    """
    from prefect import states

    for run in runs:
        now, subflows = client.read_flow_run(run.id).state, unfinished_subflows(client, [run])
        if now is None or not now.is_final() or (now.is_crashed() and state == "Cancelled"):
            client.set_flow_run_state(run.id, getattr(states, state)(message=message), force=True)
            subflows += _crashed_subflows(client, run) if state == "Cancelled" else []
        mark_ended(client, subflows, state, message)


def unfinished_subflows(client: SyncPrefectClient, runs: Sequence[FlowRun]) -> list[FlowRun]:
    """Return the unfinished subflow runs of these runs."""
    return _runs(client, state=TAKEN, parent_flow_run_id={"any_": [run.id for run in runs]})


def _crashed_subflows(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    """Return the subflow runs that crashed in the latest attempt at `run`."""
    attempts = [state.timestamp for state in client.read_flow_run_states(run.id) if state.is_running()]
    crashed = _runs(client, state={"type": {"any_": ["CRASHED"]}}, parent_flow_run_id={"any_": [run.id]})
    began = max(attempts, default=None)
    return [subflow for subflow in crashed if began and subflow.end_time and subflow.end_time >= began]


def _runs(client: SyncPrefectClient, pool: dict[str, Any] | None = None, **conditions: Any) -> list[FlowRun]:
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    in_pool = WorkPoolFilter.model_validate(pool) if pool else None
    return client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(conditions), work_pool_filter=in_pool)
