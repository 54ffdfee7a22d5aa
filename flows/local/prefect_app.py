"""Prefect's server as we serve it: behind the gate of all pages, with pauses that can be cancelled, and beside others
of the same database."""

from __future__ import annotations

import logging
from typing import Any

from flows.local.server import START_SECONDS
from trinity_core.base.gate import ELSEWHERE, Gate, server_key
from trinity_core.base.runlock import one_at_a_time

HEALTH = "/api/health"
MANIFEST = "/ico/site.webmanifest"
"""Prefect's page links to it in a way in which a browser sends no key."""


def make_app() -> Gate:
    """Return Prefect's pages and API for uvicorn; the key is that of the current directory's folder.

    Prefect's own page for the key would first show two failed requests and an advertisement. Its clients send the key
    with each request, except on WebSockets, where they send it in the first message, which Prefect checks.
    """
    from prefect.server.api.server import create_app

    leave_out_the_new_page()
    let_paused_runs_be_cancelled()
    list_what_runs_here_first()
    migrate_one_at_a_time()
    logging.getLogger("docket.dependencies").addFilter(_is_no_retry_after_a_lock)
    return Gate(create_app(final=True), server_key(), open_paths=(HEALTH, MANIFEST), asks_sockets=False)


def leave_out_the_new_page() -> None:
    """Serve Prefect's page without the banner "Try updated UI": that of 3.7.7 asks for the key at `/v2/login`, where it
    refuses it."""
    import prefect

    prefect.__ui_v2_static_path__ = prefect.__ui_v2_static_path__.with_name("left-out")


def _is_no_retry_after_a_lock(record: logging.LogRecord) -> bool:
    """False for a task that finds SQLite locked and is tried again: Prefect 3.7.7 logs twenty tracebacks a minute, 300
    MB a day, at each of which a worker's poll and its own update meet."""
    return record.exc_info is None or "database is locked" not in str(record.exc_info[1])


def let_paused_runs_be_cancelled() -> None:
    """Let a paused run be cancelled: Prefect 3.7.7 drops the request, and tells `prefect flow-run cancel` that it was
    heard."""
    from prefect.server.orchestration.core_policy import HandleResumingPausedFlows
    from prefect.server.schemas.states import StateType

    HandleResumingPausedFlows.TO_STATES = HandleResumingPausedFlows.TO_STATES - {StateType.CANCELLING}


def list_what_runs_here_first() -> None:
    """List deployments called `quickstart` before others, and those tagged `GPUs` last: Prefect's page shows ten,
    sorted by name unless told otherwise, and those of other recipes would fill it."""
    import sqlalchemy as sa
    from prefect.server.database.orm_models import Deployment
    from prefect.server.schemas.sorting import DeploymentSort
    from sqlalchemy.dialects import postgresql

    sort = DeploymentSort.as_sql_sort

    def as_sql_sort(self: DeploymentSort) -> list[sa.ColumnElement[Any]]:
        needs_gpus = Deployment.tags.has_any(sa.cast(postgresql.array(["GPUs"]), postgresql.ARRAY(sa.String())))
        first = sa.case((Deployment.name == "quickstart", 0), (needs_gpus, 2), else_=1)
        return [*([first] if self is DeploymentSort.NAME_ASC else []), *sort(self)]

    DeploymentSort.as_sql_sort = as_sql_sort  # type: ignore[method-assign]


def migrate_one_at_a_time() -> None:
    """Let a server wait while another one creates or upgrades the tables of its database: Prefect's migrations of two
    commands that start together in a new folder collide, and end one of them."""
    from prefect.server.database.interface import PrefectDBInterface
    from prefect.settings import get_current_settings

    migrate = PrefectDBInterface.run_migrations_upgrade

    async def migrate_alone(self: PrefectDBInterface) -> None:
        with one_at_a_time(get_current_settings().home / "migration.lock", START_SECONDS, instead=ELSEWHERE):
            await migrate(self)

    PrefectDBInterface.run_migrations_upgrade = migrate_alone  # type: ignore[method-assign]
