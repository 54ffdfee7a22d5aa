"""The worker of `trinity up`, the runs of its work pool, and their supervisor.

The supervisor is a process that restarts killed runs, and the worker if it has ended. A flow's own retries need its
process; the supervisor covers the loss of the process (SIGKILL, out of memory, machine down). Runs that were cancelled,
failed, or crashed before they began are not restarted.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.local.server import Process, UpState, client_environment, log_file, start_process
from tasks.prefect_api import api_client
from trinity_core.base.errors import TrinityError
from trinity_core.base.gate import server_key
from trinity_core.base.processes import still_running

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)

POOL = "trinity"
WORKER_LIMIT = 4
"""Concurrent runs: explorer, a further explorer and trainer of an asynchronous run, and the sweep."""
END_SECONDS = 45.0
"""Time for a run to save and end: its trainer has 20 s, then Ray's processes end."""
RESTARTS = 3
POLL_SECONDS = 5.0
HOUR = timedelta(hours=1)
WORKER_SECONDS = 60.0
"""Least time between the starts of two workers: one that cannot run here ends at once."""
RESTARTED = "Killed, and started again by `trinity up`"
"""State message of a restart, by which the last hour's restarts are counted."""
IGNORED = timedelta(seconds=40)
"""Age at which a cancelled run that is still alive is ended here. A worker would kill it after 30 s, but it may be
gone, and Prefect's worker ignores a second cancellation of a run (3.7.7)."""
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

    pool = WorkPoolCreate(name=POOL, type="process", is_paused=False)
    with api_client(api_url, server_key(root)) as client:
        client.create_work_pool(pool, overwrite=True)


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


def runs_of(client: SyncPrefectClient, in_pool: bool = True, **conditions: Any) -> list[FlowRun]:
    """Return the runs that meet Prefect's filter conditions; by default only those of the pool."""
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}) if in_pool else None
    return client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(conditions), work_pool_filter=pool)


def unfinished_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the pool's runs that a worker has taken and that have not ended."""
    return runs_of(client, state=TAKEN)


def unfinished_subflows(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    return runs_of(client, in_pool=False, state=TAKEN, parent_flow_run_id={"any_": [run.id]})


def process_of(run: FlowRun) -> psutil.Process | None:
    """Return the process on this machine that executes a run, or None. It has the run's id in its environment: another
    process may have got the id of the run's process since."""
    try:
        process = psutil.Process(int(run.infrastructure_pid or ""))
        return process if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id) else None
    except (ValueError, psutil.Error):
        return None


def is_gone(run: FlowRun) -> bool:
    begun = bool(run.infrastructure_pid) and run.state is not None and not run.state.is_pending()
    return begun and process_of(run) is None


def end_processes(runs: Sequence[FlowRun]) -> None:
    """Send SIGTERM to the processes of runs, which save and end, and wait for them."""
    processes = [process for run in runs if (process := process_of(run))]
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
        now, subflows = client.read_flow_run(run.id).state, unfinished_subflows(client, run)
        if now is None or not now.is_final() or (now.is_crashed() and state == "Cancelled"):
            client.set_flow_run_state(run.id, getattr(states, state)(message=message), force=True)
            subflows += _crashed_subflows(client, run) if state == "Cancelled" else []
        mark_ended(client, subflows, state, message)


def _crashed_subflows(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    """Return the subflow runs that crashed in the latest attempt at `run`."""
    attempts = [state.timestamp for state in client.read_flow_run_states(run.id) if state.is_running()]
    if not attempts:
        return []
    crashed, since = {"type": {"any_": ["CRASHED"]}}, {"after_": max(attempts)}
    return runs_of(client, in_pool=False, state=crashed, parent_flow_run_id={"any_": [run.id]}, end_time=since)


class Supervisor:
    """Restarts the worker and, with `restarts` above 0, runs that crash after `since`."""

    def __init__(self, client: SyncPrefectClient, root: Path, since: datetime, restarts: int) -> None:
        self._client = client
        self._root = root
        self._since = since
        self._restarts = restarts
        self._gone: set[tuple[Any, Any]] = set()
        """Runs, with their states, whose processes were gone in the last round."""
        self._given_up: set[Any] = set()
        """States of crashed runs that were restarted too often; logged once."""

    def look(self) -> None:
        """Run one round. Temporary failures (API down, disk full) are retried in the next round."""
        from tasks.retries import api_faults

        try:
            self._keep_worker()
            if not pool_is_shared(self._client, self._root):  # else another worker's runs would look killed
                self._end_cancelled_runs()
                self._mark_killed_runs()
            crashed: dict[str, Any] = {"state": {"type": {"any_": ["CRASHED"]}}, "end_time": {"after_": self._since}}
            for run in runs_of(self._client, **crashed) if self._restarts else ():
                # While its process is still ending, Prefect's worker would fail to take the run, and end itself.
                if process_of(run) is None:
                    self._restart_if_killed(run)
        except (*api_faults(), OSError, TrinityError, psutil.Error) as fault:
            log.warning("this round failed and is repeated: %s", fault)

    def _keep_worker(self) -> None:
        """Restart a worker that has ended."""
        up = UpState.load(self._root)
        ended = [worker for worker in up.named("worker") if not worker.alive()] if up is not None else []
        if up is not None and ended and time.time() - ended[0].started > WORKER_SECONDS:
            log.warning("the worker had ended and is started again; its log is %s", log_file("worker", self._root))
            up.record(start_worker(self._root, up.api_url), self._root)

    def _end_cancelled_runs(self) -> None:
        due = datetime.now(UTC) - IGNORED
        cancelled = [run for run in unfinished_runs(self._client) if run.state and run.state.is_cancelling()]
        ignored = [run for run in cancelled if run.state and run.state.timestamp < due and process_of(run)]
        if ignored:
            end_processes(ignored)
            time.sleep(POLL_SECONDS)  # the worker, if alive, records them as crashed
            mark_ended(self._client, ignored, "Cancelled", "It has saved and ended")

    def _mark_killed_runs(self) -> None:
        """Mark runs whose process was gone in two rounds: in between, a living worker records a better reason."""
        gone = {(run.id, run.state_id): run for run in unfinished_runs(self._client) if is_gone(run)}
        certain = [run for key, run in gone.items() if key in self._gone]
        mark_ended(self._client, certain, "Crashed", "Its process is gone, and the worker has not seen it end")
        self._gone = set(gone)

    def _restart_if_killed(self, run: FlowRun) -> None:
        from prefect.states import Scheduled

        assert run.state is not None
        left = restarts_left(self._client.read_flow_run_states(run.id), datetime.now(UTC), self._restarts)
        if left:
            mark_ended(self._client, unfinished_subflows(self._client, run), "Crashed", "The flow's process was killed")
            self._client.set_flow_run_state(run.id, Scheduled(message=RESTARTED), force=True)
            self._tell(run, f"The run {run.name} was killed and is started again. {run.state.message or ''}")
        elif left == 0 and run.state.id not in self._given_up:
            self._given_up.add(run.state.id)
            self._tell(
                run,
                f"The run {run.name} was killed again. {self._restarts} restarts were made within an hour; the next "
                f"one comes when the hour is over. `prefect flow-run retry {run.id}` starts it now.",
            )

    def _tell(self, run: FlowRun, text: str) -> None:
        log.warning(text)
        line = {"name": "trinity", "level": logging.WARNING, "message": text, "flow_run_id": str(run.id)}
        self._client.create_logs([line | {"timestamp": datetime.now(UTC).isoformat()}])


def restarts_left(states: Sequence[State[Any]], now: datetime, restarts: int) -> int | None:
    """Return the remaining restarts in this hour of a crashed run with this history of states.

    None if it was not killed while running: it was cancelled, never began, or is no longer crashed because another
    folder's supervisor was faster.
    """
    ordered = sorted(states, key=lambda state: state.timestamp)
    begins = [i for i, state in enumerate(ordered) if state.is_scheduled() and state.name != "AwaitingRetry"]
    kinds = {state.type.value for state in ordered[max(begins, default=0) :]}
    if not ordered[-1].is_crashed() or "RUNNING" not in kinds or kinds & {"CANCELLING", "CANCELLED"}:
        return None
    recent = [state for state in ordered if state.message == RESTARTED and state.timestamp > now - HOUR]
    return max(restarts - len(recent), 0)


def start_supervisor(root: Path, api_url: str, since: float, restarts: int) -> Process:
    """Start the supervisor of runs that are killed after `since`, in Unix seconds."""
    command = [sys.executable, "-m", __name__, "--api-url", api_url]
    command += ["--since", str(since), "--restarts", str(restarts)]
    env = client_environment(api_url, root)
    return Process.of("supervisor", start_process("supervisor", command, env, root).pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api-url", required=True)
    parser.add_argument("--since", required=True, type=float)
    parser.add_argument("--restarts", required=True, type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with api_client(options.api_url) as client:
        supervisor = Supervisor(client, Path.cwd(), datetime.fromtimestamp(options.since, UTC), options.restarts)
        while True:
            supervisor.look()
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
