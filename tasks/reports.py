"""What a run shows in Prefect: name and tags, progress, learning curve, summary, links to MLflow and Studio."""

from __future__ import annotations

import base64
import logging
import re
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from tasks.retries import api_faults
from trinity_core.config import Config
from trinity_core.page_notes import read_page_note, rollouts_page
from trinity_core.runtime.progress import ProgressReport
from trinity_core.runtime.summary import summary_path
from trinity_core.threads import DaemonThreads
from trinity_core.tracking.curve import draw_curve

log = logging.getLogger(__name__)

LAST_SECONDS = 300.0
"""For the report before the last one; a Prefect API that is away is waited for."""
ANSWER_SECONDS = 5.0
"""For a sign of life of Prefect's API."""


def artifact_key(config: Config, kind: str) -> str:
    """The key under which a run's artifact is found: `<project>-<name>-<kind>`."""
    words = f"{config.project} {config.name} {kind}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


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


_failed = threading.Event()
"""Set while the last attempt to show something in Prefect has failed."""


def show_if_possible(show: Callable[[], object], needs_api: bool = True) -> None:
    """Show something in Prefect. What keeps it from being shown (no API, no disk for the picture) is said once.

    It does not end a run. After a failure Prefect's API must give a sign of life before it is asked for more: each
    request to an API that is away takes long.
    """
    if needs_api and _failed.is_set() and not _api_answers():
        return
    faults: tuple[type[Exception], ...] = (*api_faults(), OSError)
    try:
        show()
    except faults as error:
        if not _failed.is_set():
            get_run_logger().warning("The run continues, but Prefect does not show all of it: %s", error)
        _failed.set()
    else:
        if needs_api:
            _failed.clear()


def _api_answers() -> bool:
    """True if Prefect's API gives any answer, or if there is none to be asked but Prefect's own in this process."""
    api_url = PREFECT_API_URL.value()
    try:
        return api_url is None or bool(httpx.get(f"{api_url}/health", timeout=ANSWER_SECONDS).status_code)
    except httpx.HTTPError:
        return False


class LiveReport(ProgressReport):
    """Shows progress in Prefect's log and as artifacts."""

    def __init__(self, config: Config, source: str) -> None:
        super().__init__(config, source)
        self._artifact: UUID | None = None
        self._reporting: Future[None] | None = None

    def report(self, done: bool = False) -> None:
        """Report now."""
        if done and self._reporting is not None:
            wait([self._reporting], LAST_SECONDS)
        show_if_possible(lambda: super(LiveReport, self).report(done), needs_api=False)

    def report_if_due(self) -> None:
        """As `report`, in a thread: while Prefect's API does not answer, the run must hear of signals and losses."""
        if self._reporting is not None:
            if not self._reporting.done():
                return
            self._reporting.result()
        report = partial(show_if_possible, super().report_if_due, needs_api=False)
        self._reporting = DaemonThreads("report").submit(copy_context().run, report)

    def show(self, text: str, percent: float) -> None:
        """Log the text; update the progress bar and the learning curve."""
        self.tell(text, percent)
        show_if_possible(lambda: show_curve(self.config))

    def tell(self, text: str, percent: float) -> None:
        """Log the text and update the progress bar."""
        get_run_logger().info(text)
        show_if_possible(lambda: self._show_progress(text, percent))

    def _show_progress(self, text: str, percent: float) -> None:
        if self._artifact is None:
            key = artifact_key(self.config, f"{self.source} progress")
            self._artifact = cast(UUID, create_progress_artifact(percent, key=key, description=text))
        else:
            update_progress_artifact(self._artifact, percent, description=text)


def show_curve(config: Config) -> None:
    """Draw the learning curve anew and show it."""
    path = draw_curve(config.job_dir, f"{config.project} / {config.name}")
    if path is not None:
        show_picture(config, path)


def show_picture(config: Config, path: Path) -> None:
    """The learning curve as an image artifact that needs no file server: the picture is in its address."""
    picture = base64.b64encode(path.read_bytes()).decode()
    create_image_artifact(
        f"data:image/png;base64,{picture}", key=artifact_key(config, "curve"), description="Learning curve"
    )


def show_tracking(config: Config, link: str) -> None:
    """Show how to open the tracked metrics: a link, or a command."""
    key = artifact_key(config, "tracking")
    kind = config.monitor.monitor_type
    if link.startswith("http"):
        create_link_artifact(link, link_text=f"{config.project}/{config.name} in {kind}", key=key)
    elif kind == "mlflow":
        page = "http://127.0.0.1:5000"
        text = f"[{config.project}/{config.name} in MLflow]({page}), served by\n\n```sh\n{link}\n```\n"
        create_markdown_artifact(text, key=key, description="MLflow")
    else:
        create_markdown_artifact(f"```sh\n{link}\n```\n", key=key, description=kind)


def show_studio(config: Config) -> None:
    """Link to the run and its rollouts in Studio while that is served; else give the command that shows rollouts."""
    page = read_page_note(config.job_dir.parent.parent, "studio").get("url")
    run = f"{config.project}/{config.name}"
    rollouts = artifact_key(config, "rollouts")
    if page:
        link = f"{page}/runs?{urlencode({'run': run})}"
        create_link_artifact(link, link_text=f"{run} in Studio", key=artifact_key(config, "studio"))
        create_link_artifact(f"{page}{rollouts_page(run)}", link_text=f"Rollouts of {run}", key=rollouts)
    else:
        command = f"trinity view --checkpoint-dir {shlex.quote(str(config.job_dir))}"
        create_markdown_artifact(f"```sh\n{command}\n```\n", key=rollouts, description="Sampled rollouts")


def show_summary(config: Config, summary: dict[str, Any]) -> None:
    """A run's results as a two-column table."""
    rows = "\n".join(f"| {name} | {_shown(value)} |" for name, value in summary.items() if value not in (None, "", {}))
    text = f"## {config.project} / {config.name}\n\n| | |\n| --- | --- |\n{rows}\n"
    key = artifact_key(config, summary_path(config).stem)
    create_markdown_artifact(text, key=key, description="Summary")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "<br>".join(f"{name} {_shown(part)}" for name, part in value.items())
    return str(value)
