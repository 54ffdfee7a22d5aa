"""The runs of `trinity up`'s worker, as Prefect's API knows them: ended in order, or marked where nobody ends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

END_SECONDS = 45.0
"""For a cancelled run to end: Prefect kills it after 30 s, looks every 3 s, and must first hear of it."""
POLL_SECONDS = 0.5
CLOCK_SECONDS = 1.0
"""By which the kernel's time of a process's start may be off."""


@contextmanager
def pause_pool(client: SyncPrefectClient, pool: str) -> Iterator[None]:
    """Within this context no worker takes a new run from the pool: what is scheduled stays so."""
    from prefect.client.schemas.actions import WorkPoolUpdate

    if client.read_work_pool(pool).is_paused:
        yield
        return
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    try:
        yield
    finally:
        client.update_work_pool(pool, WorkPoolUpdate(is_paused=False))


def pool_is_shared(client: SyncPrefectClient, pool: str, worker: str) -> bool:
    """Whether another worker than the one of that name takes runs from the pool: one database may serve two folders."""
    from prefect.client.schemas.objects import WorkerStatus

    others = [each for each in client.read_workers_for_work_pool(pool) if each.name != worker]
    return any(each.status == WorkerStatus.ONLINE for each in others)


def cancel_runs(client: SyncPrefectClient, pool: str, say: Callable[[str], None], workers: Sequence[int]) -> None:
    """Cancel the pool's runs and wait until the workers, whose process ids these are, have ended them; they save first.

    A run that has outlived its worker gets SIGTERM from here, and counts as cancelled once it has ended.
    """
    from prefect.states import Cancelled, Cancelling

    asked: set[Any] = set()
    orphans: list[FlowRun] = []
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        left = [run for run in unfinished_runs(client, pool) if not process_is_gone(run)]
        if not left:
            break
        for run in left:
            if run.id not in asked:
                asked.add(run.id)
                say(f"Cancelling the run {run.name}: training saves at its next step boundary …")
                client.set_flow_run_state(run.id, Cancelling())
                if _end_orphan(run, workers):
                    orphans.append(run)
        time.sleep(POLL_SECONDS)
    for run in orphans:
        if process_is_gone(run):
            client.set_flow_run_state(run.id, Cancelled(), force=True)


def _end_orphan(run: FlowRun, workers: Sequence[int]) -> bool:
    """Send SIGTERM to the process of a run that has outlived its worker; whether it is such a run."""
    with suppress(psutil.NoSuchProcess):
        process = run_process(run)
        if process is not None and process.ppid() not in workers:
            process.terminate()
            return True
    return False


def mark_crashed(client: SyncPrefectClient, runs: Sequence[FlowRun], message: str) -> None:
    """End in Prefect's books runs that no process works on any more, with their subflows.

    As long as they count as running they keep their place in a deployment's `concurrency_limit`.
    """
    from prefect.states import Crashed

    for run in runs:
        client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    mark_subflows_crashed(client, runs, message)


def run_process(run: FlowRun) -> psutil.Process | None:
    """The process in which a run is, or was, at work, if it lives on this machine. It may be the run's former one."""
    try:
        process = psutil.Process(int(run.infrastructure_pid or ""))
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except (ValueError, psutil.NoSuchProcess):
        return None
    return process if alive else None


def process_is_gone(run: FlowRun) -> bool:
    """Whether the run has begun in a process that has ended since, or whose number belongs to a later one."""
    if not run.infrastructure_pid or run.state is None or run.state.is_pending():
        return False
    process = run_process(run)
    return process is None or process.create_time() > run.state.timestamp.timestamp() + CLOCK_SECONDS


def mark_subflows_crashed(client: SyncPrefectClient, runs: Sequence[FlowRun], message: str) -> None:
    """End in Prefect's books the subflows of runs whose processes are gone."""
    from prefect.states import Crashed

    while runs:
        runs = _subflows(client, runs)
        for run in runs:
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)


def unfinished_runs(client: SyncPrefectClient, pool: str) -> list[FlowRun]:
    """The pool's runs that a worker has taken and that have not ended."""
    return client.read_flow_runs(flow_run_filter=_filter(state=_TAKEN), work_pool_filter=_in_pool(pool))


def crashed_runs(client: SyncPrefectClient, pool: str, since: datetime) -> list[FlowRun]:
    """The pool's runs that have crashed since a time and are in that state now."""
    crashed = _filter(state={"type": {"any_": ["CRASHED"]}}, end_time={"after_": since})
    return client.read_flow_runs(flow_run_filter=crashed, work_pool_filter=_in_pool(pool))


def _in_pool(pool: str) -> Any:
    from prefect.client.schemas.filters import WorkPoolFilter

    return WorkPoolFilter.model_validate({"name": {"any_": [pool]}})


def _subflows(client: SyncPrefectClient, runs: Sequence[FlowRun]) -> list[FlowRun]:
    parents = {"any_": [run.id for run in runs]}
    return client.read_flow_runs(flow_run_filter=_filter(state=_TAKEN, parent_flow_run_id=parents))


_TAKEN = {
    "operator": "or_",
    "type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]},
    "name": {"any_": ["AwaitingRetry"]},
}
"""A flow between two of its attempts counts as scheduled; its process waits."""


def _filter(**given: Any) -> Any:
    from prefect.client.schemas.filters import FlowRunFilter

    return FlowRunFilter.model_validate(given)
