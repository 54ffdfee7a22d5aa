"""The supervisor of `trinity up`: a process that restarts killed runs, and the worker if it has ended.

A flow's own retries need its process; the supervisor covers the loss of the process (SIGKILL, out of memory, machine
down). Runs that were cancelled, failed, or crashed before they began are not restarted.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.local.server import Process, UpState, client_environment, log_file, start_process
from flows.local.worker import (
    crashed_runs,
    end_processes,
    is_gone,
    mark_ended,
    pool_is_shared,
    process_of,
    start_worker,
    unfinished_runs,
    unfinished_subflows,
)
from tasks.prefect_api import api_client
from trinity_core.base.errors import TrinityError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)

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
            for run in crashed_runs(self._client, self._since) if self._restarts else ():
                # While its process is still ending, Prefect's worker would fail to take the run, and end itself.
                if not isinstance(process_of(run), psutil.Process):
                    self._restart_if_killed(run)
        except (*api_faults(), OSError, TrinityError, psutil.Error) as fault:
            log.warning("this round failed and is repeated: %s", fault)

    def _keep_worker(self) -> None:
        """Restart a worker that has ended."""
        up = UpState.load(self._root)
        ended = [worker for worker in up.named("worker") if not worker.alive()] if up is not None else []
        if up is not None and ended and time.time() - ended[0].started > WORKER_SECONDS:
            log.warning("the worker had ended and is started again; its log is %s", log_file("worker", self._root))
            up.add(start_worker(self._root, up.api_url))
            up.save(self._root)

    def _end_cancelled_runs(self) -> None:
        ignored = [
            run for run in unfinished_runs(self._client)
            if run.state and run.state.is_cancelling() and run.state.timestamp < datetime.now(UTC) - IGNORED
            and isinstance(process_of(run), psutil.Process)
        ]  # fmt: skip
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
            mark_ended(
                self._client, unfinished_subflows(self._client, [run]), "Crashed", "The flow's process was killed"
            )
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


def start_supervisor(root: Path, api_url: str, since: datetime, restarts: int) -> Process:
    command = [sys.executable, "-m", __name__, "--api-url", api_url]
    command += ["--since", since.isoformat(), "--restarts", str(restarts)]
    env = client_environment(api_url, root)
    return Process.of("supervisor", start_process("supervisor", command, env, root).pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api-url", required=True)
    parser.add_argument("--since", required=True, type=datetime.fromisoformat)
    parser.add_argument("--restarts", required=True, type=int)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with api_client(options.api_url) as client:
        supervisor = Supervisor(client, Path.cwd(), options.since.astimezone(UTC), options.restarts)
        while True:
            supervisor.look()
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
