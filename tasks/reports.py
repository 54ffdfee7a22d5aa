"""What a run shows in Prefect: name and tags, progress, learning curve, rollouts, summary with links."""

from __future__ import annotations

import logging
import math
import re
import shlex
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import UUID

import httpx
from prefect.logging import get_run_logger
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tasks.retries import api_faults
from trinity_core.base.addresses import studio_links
from trinity_core.base.threads import DaemonThread
from trinity_core.config import Config
from trinity_core.exchange.tracking.curve import LearningCurve, curve_title, embedded
from trinity_core.exchange.tracking.mlflow_root import default_uri, mlflow_address
from trinity_core.exchange.tracking.mlflow_writer import served_run
from trinity_core.exchange.tracking.progress import ProgressReport
from trinity_core.exchange.tracking.rollouts import (
    markdown_text,
    newest_rollouts,
    rollouts_text,
    run_with_rollouts,
    source_text,
)
from trinity_core.exchange.tracking.scores import scores_text
from trinity_core.run.summary import summary_rows

log = logging.getLogger(__name__)

BAR = 20
REPORT_SECONDS, MAX_REPORT_SECONDS = 10.0, 60.0
"""Minimum and maximum time between two updates of the artifacts."""
REPORT_SHARE = 0.01
"""Maximum share of time for them: Prefect's cost up to a second, on cores that engines and trainer need."""
LONGEST_NAME = 80
"""Characters of a flow run's name."""
LONGEST_TEXT = 2000
"""Characters of one result in the summary."""
LAST_SECONDS = 300.0
"""Time limit for the pending report before the last one, while Prefect's API is down."""
ANSWER_SECONDS = 5.0


def artifact_key(config: Config, kind: str) -> str:
    """Return the key of a run's artifact: `<project>-<name>-<kind>`, for an evaluation `-evaluation-<kind>`.

    Prefect's page shows the latest artifact of each key, so an evaluation must not replace the run's, nor a run another
    one whose name differs in what a key cannot hold.
    """
    run = f"{config.project} {config.name}"
    digest = "" if re.fullmatch(r"[\w .-]*", run, re.ASCII) else sha256(run.encode()).hexdigest()[:8]
    words = f"{run} {digest} {'evaluation ' * (config.mode == 'bench')}{kind}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def label_run(project: str, name: str, stage: str, *more: str, ending: str = "") -> None:
    """Name the current flow run `<project>/<name>` (Prefect shows its flow beside that) with this ending, and tag it
    with project, name, stage and what is `more`.

    Later attempts have their number at the end. If Prefect's API refuses them, the run continues without.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    ours = {f"project:{project}", f"name:{name}", f"stage:{stage}", *more}
    tags = sorted(ours | {tag for tag in context.flow_run.tags if not tag.startswith(("project:", "name:", "stage:"))})
    shown = f"{project}/{name}{ending}"
    try:
        with get_client(sync_client=True) as client:
            # The context's flow run predates the count of its current attempt.
            if (attempt := client.read_flow_run(context.flow_run.id).run_count) > 1:
                shown += f" · attempt {attempt}"
            client.update_flow_run(context.flow_run.id, name=shown, tags=tags)
    except api_faults() as error:
        log.warning("the run cannot be named in Prefect: %s", error)


def name_run(name: str, ending: str = "") -> None:
    """Give the current flow run another name, cut at a word, which `prefect deployment run --watch` prints beside its
    state, and `prefect flow-run logs` before each line."""
    from prefect.client.orchestration import get_client

    if flow_run.id:
        shown = textwrap.shorten(name, LONGEST_NAME, placeholder=" …") + ending
        with suppress(*api_faults()), get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=shown)


_failed = threading.Event()
"""Set if the last attempt to show something in Prefect failed."""


def show_if_possible(show: Callable[[], object], needs_api: bool = True) -> None:
    """Show something in Prefect. A failure (no API, no disk space for the picture) is logged once and never ends a run.

    After a failure nothing is sent until Prefect's API passes a health check, because requests to an API that is down
    take long.
    """
    if needs_api and _failed.is_set() and not _api_answers():
        return
    faults: tuple[type[Exception], ...] = (*api_faults(), OSError)
    try:
        show()
    except faults as error:
        if not _failed.is_set():
            get_run_logger().warning("The run continues, but Prefect cannot show all of it: %s", error)
        _failed.set()
    else:
        if needs_api:
            _failed.clear()


def _api_answers() -> bool:
    """True if Prefect's API answers at all, or if there is none except Prefect's own in this process."""
    api_url = PREFECT_API_URL.value()
    try:
        return api_url is None or bool(httpx.get(f"{api_url}/health", timeout=ANSWER_SECONDS).status_code)
    except httpx.HTTPError:
        return False


class LiveReport(ProgressReport):
    """Shows progress in Prefect's log, as a bar on a terminal, and once in a while as artifacts. Prefect prints log
    lines at once and sends them to its API in batches, each artifact in a request of its own."""

    def __init__(self, config: Config, source: str) -> None:
        super().__init__(config, source)
        self._text = self._shown_text = ""
        """What was logged last, and what the artifacts show."""
        self._showing: Future[None] | None = None
        self._due = 0.0
        self._thread = DaemonThread("report")
        """A single thread for all artifacts: matplotlib caches fonts, and malloc memory, per drawing thread."""

    def report(self) -> None:
        """Log what is new, and show it in a thread: while Prefect's API does not answer, the run must still notice
        signals and losses."""
        show_if_possible(super().report, needs_api=False)
        if (bars := terminal_bars()) is not None and self.total_steps:
            bars.show(self.source, self.lines.step_text(self.total_steps), self._percent())
        if self._showing is not None:
            if not self._showing.done():
                return
            self._showing.result()
        if self._text != self._shown_text and time.monotonic() >= self._due:
            self._showing = self._thread.submit(self.show)

    def tell(self, text: str) -> None:
        get_run_logger().info(text)
        self._text = text

    def show(self, ends: bool = False) -> None:
        """Show the progress on the run's page, with its curve and rollouts."""
        began, text = time.monotonic(), self._text
        percent = 100.0 if ends and self.total_steps is None else self._percent()
        _page(self.config).progress[self.source] = f"{_bar(percent)} {text}"
        show_if_possible(lambda: _show_page(self.config, text.partition(":")[0]))
        show_if_possible(lambda: show_curve(self.config, if_due=not ends))
        show_if_possible(lambda: show_rollouts(self.config))
        self._shown_text, self._due = text, time.monotonic() + pause_after(time.monotonic() - began)

    def finish(self) -> None:
        self._due = math.inf
        super().finish()
        if self._showing is not None:
            wait([self._showing], LAST_SECONDS)
        if self._text:
            self.show(ends=True)

    def close(self) -> None:
        if (bars := terminal_bars()) is not None:
            bars.remove(self.source)

    def _percent(self) -> float:
        step = self.lines.last.step if self.lines.last else 0
        return min(100.0 * step / self.total_steps, 100.0) if self.total_steps else 0.0


def pause_after(cost: float) -> float:
    """Return the seconds until artifacts are due again, after `cost` seconds to show them."""
    return min(max(cost / REPORT_SHARE, REPORT_SECONDS), MAX_REPORT_SECONDS)


class TerminalBars:
    """A bar for each actor, with its step and the time left, below the log lines on the terminal."""

    def __init__(self, console: Console) -> None:
        """`console`: the one that prints the log lines."""
        bar = BarColumn(style="bright_black", complete_style="green", finished_style="green")
        columns = TextColumn("{task.description}"), bar, TextColumn("{task.fields[text]}")
        self._bars = Progress(*columns, console=console, transient=True, refresh_per_second=2, redirect_stdout=False)
        self._rows: dict[str, TaskID] = {}
        self._lock = Lock()

    def show(self, source: str, text: str, percent: float) -> None:
        with self._lock, suppress(OSError):  # a closed terminal: the run must save
            if source not in self._rows:
                self._bars.start()
                self._rows[source] = self._bars.add_task(source, text=text)
            self._bars.update(self._rows[source], completed=percent, text=text)

    def remove(self, source: str) -> None:
        with self._lock, suppress(OSError):
            if (row := self._rows.pop(source, None)) is not None:
                self._bars.remove_task(row)
                if not self._rows:
                    self._bars.stop()


@cache
def terminal_bars() -> TerminalBars | None:
    """Return the bars on the terminal to which Prefect logs; None if that is none."""
    handlers = logging.getLogger().handlers
    consoles = [handler.console for handler in handlers if isinstance(handler, PrefectConsoleHandler)]
    return next((TerminalBars(console) for console in consoles if console.is_interactive), None)


def _bar(percent: float) -> str:
    done = round(percent / 100 * BAR)
    return f"`{'█' * done}{'░' * (BAR - done)}` {percent:.0f} %"


@dataclass
class RunPage:
    """What a flow run shows of a run."""

    progress: dict[str, str] = field(default_factory=dict)
    results: str = ""
    artifacts: dict[str, UUID] = field(default_factory=dict)
    """Key → artifact that this process created and keeps updating."""
    curve: LearningCurve | None = None
    curve_due: float = 0.0
    """Monotonic time from which on the curve may be drawn again."""
    drawing: Lock = field(default_factory=Lock)


_PAGES: defaultdict[tuple[str, Path], RunPage] = defaultdict(RunPage)
"""Pages by flow run and run; a process has few."""
_LOCK = Lock()
"""Explorer and trainer report from separate threads."""


def _page(config: Config) -> RunPage:
    return _PAGES[flow_run.id or "", config.job_dir]


def _put(config: Config, kind: str, text: str, description: str) -> None:
    """Create or update a Markdown artifact of the flow run itself, even from within a task."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

    artifacts, key = _page(config).artifacts, artifact_key(config, kind)
    with _LOCK, get_client(sync_client=True) as client:
        if key in artifacts:
            client.update_artifact(artifacts[key], ArtifactUpdate(data=text, description=description))
            return
        flow_run_id = UUID(flow_run.id) if flow_run.id else None
        artifact = ArtifactCreate(type="markdown", key=key, data=text, description=description, flow_run_id=flow_run_id)
        artifacts[key] = client.create_artifact(artifact).id


def begin_summary(config: Config) -> None:
    """Show the summary of a new attempt: links only."""
    page = _page(config)
    page.progress, page.results = {}, ""
    # Remains if the attempt fails before its first step.
    _show_page(config, "no stage has ended yet" if config.stages else "no step yet")


def _links(config: Config) -> str:
    """Return links to the run in Studio and MLflow if they are served, otherwise commands."""
    root, folder = config.job_dir.parent.parent, shlex.quote(str(config.job_dir))
    sampled = run_with_rollouts(config.job_dir).name
    links = studio_links(root, f"{config.project}/{config.name}", f"{config.project}/{sampled}")
    if config.monitor.monitor_type == "mlflow":
        uri = str(config.monitor.monitor_args.get("uri") or default_uri(root))
        # MLflow has no run before the run's first metrics.
        if address := served_run(config.job_dir) or mlflow_address(root, uri):
            links.append(f"[MLflow]({address})")
    return " · ".join([*links, f"Logs: `trinity log --checkpoint-dir {folder} --follow`"])


def _show_page(config: Config, title: str) -> None:
    page = _page(config)
    lines = [f"## {config.project} / {config.name}", _links(config)]
    progress = page.progress.copy()  # other threads add to it; copying is atomic, even while `_LOCK` is taken
    lines += [f"**{source}** {text}" for source, text in progress.items()]
    _put(config, "summary", "\n\n".join([*lines, page.results]), f"Summary: {title}")


def show_curve(config: Config, if_due: bool = False) -> None:
    """Draw and show the run's learning curve; with `if_due` only as often as `REPORT_SHARE` allows."""
    page = _page(config)
    with page.drawing:
        if if_due and time.monotonic() < page.curve_due:
            return
        began = time.thread_time()  # CPU time taken from engines and trainer, without waits for Prefect
        page.curve = page.curve or LearningCurve(config.job_dir, curve_title(config))
        if (path := page.curve.draw()) is not None:
            _put_picture(config, path, page.curve.step)
        page.curve_due = time.monotonic() + (time.thread_time() - began) / REPORT_SHARE


def show_stage(config: Config, summary: dict[str, Any]) -> None:
    """Show on a pipeline's page the curve of the last stage that has trained, which its summary names, and the newest
    rollouts."""
    if (curve := summary.get("curve")) and Path(curve).exists():
        _put_picture(config, Path(curve), summary["step"])
    show_rollouts(config)


def _put_picture(config: Config, path: Path, step: int) -> None:
    _put(config, "curve", f"![Learning curve]({embedded(path.read_bytes())})", f"Learning curve: step {step}")


def show_rollouts(config: Config) -> None:
    """Show the newest sampled rollouts of a run, or of a pipeline's last stage that has any, preferably an
    evaluation's, below the links."""
    folder = run_with_rollouts(config.job_dir) if config.stages else config.job_dir
    if sample := newest_rollouts(folder):
        source, step, rollouts = sample
        text = f"{_links(config)}\n\n{rollouts_text(rollouts)}"
        _put(config, "rollouts", text, f"Rollouts: {source_text(source)}, step {step}")


def show_summary(config: Config, summary: dict[str, Any], running: str = "") -> None:
    """Show a run's results as the terminal does, below the links, one of which leads to the tracked run. Not as a
    table, in which Prefect's page wraps no text. `running`: the stage of a pipeline that has begun, and may fail."""
    values = [(name, str(value)) for name, value in summary.items() if value]
    rows = summary_rows(summary) if "scores" in summary else values
    if running:
        rows.insert(0, ("stage", running))
    lines = [f"**{title}** {markdown_text(text, LONGEST_TEXT)}" for title, text in rows if title != "tracking"]
    _page(config).results = "  \n".join(lines)
    shown = [f"step {summary['step']}"] if "step" in summary else []
    if (score := summary.get("score")) is not None:
        shown.append(scores_text(summary.get("evaluation") or {}) or f"score {score:.3f}")
    if running:
        shown.append(f"stage {running}")
    _show_page(config, ", ".join(shown) or "finished")
