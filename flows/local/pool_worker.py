"""The worker of `trinity up`: Prefect's own for processes, in which a run that runs again can be cancelled again.

Prefect's runner notes which runs it is cancelling, and never removes one whose process it has ended: it takes a later
cancellation of the same run for one that is under way. What is cleared here is private to Prefect, whose version is
pinned; `tests/flows/test_flows_up.py` cancels a run twice.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import os
from contextlib import suppress
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.utilities.processutils import setup_signal_handlers_worker
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker, ProcessWorkerResult


class Worker(ProcessWorker, abc.ABC):
    """Prefect's worker for processes. As an abstract class it does not take that one's place in Prefect's registry."""

    async def run(
        self, flow_run: FlowRun, configuration: ProcessJobConfiguration, task_status: Any = None
    ) -> ProcessWorkerResult:
        """Run a flow run, maybe again, in a process of its own until it ends."""
        self._runner._cancelling_flow_run_ids.discard(flow_run.id)
        return await super().run(flow_run, configuration, task_status)


async def work(worker: Worker) -> None:
    """Take runs from the pool until the first SIGTERM or SIGINT, and then wait for those that run."""
    # Within asyncio, whose handler of SIGINT is the one that this leads to.
    setup_signal_handlers_worker(os.getpid(), "the worker", print)
    with suppress(asyncio.CancelledError):
        await worker.start(printer=print)


def main() -> None:
    """Start the worker that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--limit", required=True, type=int, help="runs at a time")
    given = parser.parse_args()
    asyncio.run(work(Worker(given.pool, name=given.name, limit=given.limit)))


if __name__ == "__main__":
    main()
