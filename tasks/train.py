"""The task `train`."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import LiveReport
from trinity_core.runtime import run
from trinity_core.runtime.session import Session


@task(name="train", cache_policy=NO_CACHE, persist_result=False)
def train(session: Session) -> dict[str, Any]:
    """Train until the last step or until the session stops; the summary of rank 0."""
    return session.train(run.train, LiveReport(session.config, "trainer"))
