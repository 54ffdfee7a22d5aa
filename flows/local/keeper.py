"""The keeper: a process of `trinity up` that starts again what was killed, be it a run or the worker itself.

A worker notes that the process of a run has ended. For runs that outlive their worker the keeper does.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.local.restarts import POLL_SECONDS, Restarter
from flows.local.runs import mark_crashed, process_is_gone, unfinished_runs
from flows.local.server import Process, UpState, prefect_environment, start_process
from flows.local.work_pool import POOL, start_worker
from tasks.prefect_api import api_client
from trinity_core.errors import TrinityError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

log = logging.getLogger(__name__)

WORKER_STARTS = 5
"""Within an hour; a worker that ends more often has a fault that starting it does not mend."""
HOUR_SECONDS = 3600.0


class Keeper:
    """Looks after the worker, the runs and, with `restarts` above 0, starts killed runs again."""

    def __init__(self, client: SyncPrefectClient, root: Path, since: datetime, restarts: int) -> None:
        self._client = client
        self._root = root
        self._restarter = Restarter(client, POOL, since, restarts) if restarts else None
        self._started: list[float] = []
        """When the worker was started again."""
        self._gone: set[tuple[Any, Any]] = set()
        """Runs, with their states, whose processes were gone at the last look."""

    def look(self) -> None:
        """Look once. What does not work now (the API is away, a disk is full) is tried again at the next look."""
        from tasks.retries import api_faults

        try:
            self._keep_worker()
            self._mark_gone_runs()
            if self._restarter is not None:
                self._restarter.look()
        except (*api_faults(), OSError, TrinityError, psutil.Error) as fault:
            log.warning("not all was looked after, it is tried again: %s", fault)

    def _keep_worker(self) -> None:
        up = UpState.load(self._root)
        if up is None or all(each.alive() for each in up.named("worker")):
            return
        now = time.monotonic()
        self._started = [at for at in self._started if now - at < HOUR_SECONDS]
        if len(self._started) < WORKER_STARTS:
            self._started.append(now)
            log.warning("the worker was gone and is started again")
            up.replace(start_worker(self._root, up.api_url)).save(self._root)

    def _mark_gone_runs(self) -> None:
        """Only what two looks have found: the worker, if it lives, notes an ended process with the better reason."""
        gone = {(run.id, run.state_id): run for run in unfinished_runs(self._client, POOL) if process_is_gone(run)}
        certain: list[FlowRun] = [run for key, run in gone.items() if key in self._gone]
        mark_crashed(self._client, certain, "Its process is gone, and the worker has not seen it end")
        self._gone = set(gone)


def start_keeper(root: Path, api_url: str, since: datetime, restarts: int) -> Process:
    """Start the keeper of the runs that crash after `since`."""
    options = {"--api-url": api_url, "--since": since.isoformat(), "--restarts": str(restarts)}
    command = [sys.executable, "-m", __name__, *(word for pair in options.items() for word in pair)]
    env = prefect_environment(root) | {"PREFECT_API_URL": api_url}
    return Process.of("keeper", start_process("keeper", command, env, root).pid)


def main() -> None:
    """Look every few seconds, until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api-url", required=True)
    parser.add_argument("--since", required=True, type=datetime.fromisoformat)
    parser.add_argument("--restarts", required=True, type=int)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with api_client(given.api_url) as client:
        keeper = Keeper(client, Path.cwd(), given.since.astimezone(UTC), given.restarts)
        while True:
            keeper.look()
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
