"""The task `explore`."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import LiveReport
from trinity_core.runtime import run
from trinity_core.runtime.session import Session
from trinity_core.tracking.metrics_file import explorer_source


@task(name="explore", cache_policy=NO_CACHE, persist_result=False)
def explore(session: Session) -> dict[str, Any]:
    """Explore until all tasks are done or the session stops; the explorer's summary."""
    return session.explore(run.explore, LiveReport(session.config, explorer_source(session.config.explorer.name)))
