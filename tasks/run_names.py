"""What a run is called in Prefect's UI: its name, tags and artifact keys."""

from __future__ import annotations

import logging
import re

from tasks.retries import api_faults
from trinity_core.config import Config

log = logging.getLogger(__name__)


def slug(text: str) -> str:
    """Text as an artifact key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def artifact_key(config: Config, kind: str) -> str:
    """The key under which a run's artifact is found: `<project>-<name>-<kind>`."""
    return slug(f"{config.project} {config.name} {kind}")


def label_run(project: str, name: str, stage: str, *more: str) -> None:
    """Name and tag the current flow run: `<project>/<name>`, with tags for project, name and stage.

    If Prefect's API does not take them, the run goes on without.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    ours = {f"project:{project}", f"name:{name}", f"stage:{stage}", *more}
    tags = sorted(ours | {tag for tag in context.flow_run.tags if not tag.startswith(("project:", "name:", "stage:"))})
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(context.flow_run.id, name=f"{project}/{name}", tags=tags)
    except api_faults() as error:
        log.warning("the run cannot be named in Prefect: %s", error)
