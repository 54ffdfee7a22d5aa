"""The task `train`: it starts the trainer's workers, connects them, waits for them and shows how far they are."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import LiveReport
from trinity_core.runtime.actors import SAVE_SECONDS, connect_trainers, run_until_done
from trinity_core.runtime.session import Session


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(session: Session) -> dict[str, Any]:
    """Train until the last step or until the session stops; the summary of rank 0."""
    workers = session.trainers()
    progress = connect_trainers(workers, lambda: session.stopping)
    report = LiveReport(session.config, "trainer", progress["total_steps"])
    runs = [worker.run.remote() for worker in workers]

    def stop() -> None:
        for worker in workers:
            worker.stop.remote()

    summaries = run_until_done(runs, stop, lambda: session.stopping, SAVE_SECONDS, report)
    report.report(done=True)
    return summaries[0]
