"""The task `explore`: it starts the explorer, waits for it and shows how far it is."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import LiveReport
from trinity_core.runtime.actors import EXPLORER_SECONDS, run_until_done
from trinity_core.runtime.faults import result_of
from trinity_core.runtime.session import Session
from trinity_core.tracking.metrics_file import explorer_source


@task(name="explore", cache_policy=NO_CACHE, persist_result=False)
def explore(session: Session) -> dict[str, Any]:
    """Explore until all tasks are done or the session stops; the explorer's summary."""
    explorer = session.explorer()
    result_of(explorer.prepare.remote(), lambda: session.stopping)
    progress = result_of(explorer.progress.remote(), lambda: session.stopping)
    source = explorer_source(session.config.explorer.name)
    report = LiveReport(session.config, source, progress["total_steps"])
    run = explorer.run.remote()
    [summary] = run_until_done([run], explorer.stop.remote, lambda: session.stopping, EXPLORER_SECONDS, report)
    report.report(done=True)
    return summary
