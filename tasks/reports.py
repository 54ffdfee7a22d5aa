"""What a run shows while it works and when it is done: progress, learning curve, sampled rollouts, MLflow's address."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from tasks.retries import api_faults
from tasks.run_names import artifact_key
from trinity_core.config import Config
from trinity_core.tracking.curve import draw_curve
from trinity_core.tracking.metrics_file import MetricLine, read_metrics
from trinity_core.tracking.rollouts import latest_rollouts, rollouts_table

REPORT_SECONDS, MAX_REPORT_SECONDS = 10.0, 60.0
"""Between two reports, at least and at most."""
REPORT_SHARE = 0.01
"""Of the time that reports may take: the picture and three calls of Prefect's API cost up to a second, on cores that
engines and trainer want."""
SHOWN = (
    "reward/mean", "accuracy/mean", "actor/final_loss", "actor/grad_norm", "response_length/mean",
    "tokens_per_second", "time/step", "timing_s/step",
)  # fmt: skip
"""What the line of progress says, of the numbers that there are."""


class LiveReport:
    """Called often within a task; reports as often as `REPORT_SHARE` allows, and only what has changed."""

    def __init__(self, config: Config, source: str, total_steps: int | None) -> None:
        self._config = config
        self._source = source
        self._total = total_steps
        self._artifact: UUID | None = None
        self._step = -1
        self._due = 0.0
        self._warned = False
        self._faults: tuple[type[Exception], ...] = (*api_faults(), OSError)

    def __call__(self) -> None:
        """Report where it is time to."""
        began = time.monotonic()
        if began >= self._due:
            self.report()
            self._due = time.monotonic() + pause_after(time.monotonic() - began)

    def report(self, done: bool = False) -> None:
        """Report now. Where that is not possible (no API, no disk for the picture) it is said once; the run goes on."""
        try:
            self._report(done)
        except self._faults as error:
            if not self._warned:
                get_run_logger().warning("The progress cannot be shown in Prefect, the run goes on: %s", error)
            self._warned = True

    def _report(self, done: bool) -> None:
        lines = [line for line in read_metrics(self._config.job_dir) if line.source == self._source]
        step = lines[-1].step if lines else 0
        if (step == self._step and not done) or not lines:
            return
        self._step = step
        text = progress_text(lines, self._total)
        get_run_logger().info(text)
        percent = 100.0 if done else min(100.0 * step / self._total, 100.0) if self._total else 0.0
        if self._artifact is None:
            key = artifact_key(self._config, f"{self._source} progress")
            self._artifact = cast(UUID, create_progress_artifact(percent, key=key, description=text))
        else:
            update_progress_artifact(self._artifact, percent, description=text)
        show_curve(self._config)
        show_rollouts(self._config)


def pause_after(cost: float) -> float:
    """Seconds to the next report, after one that took `cost` seconds."""
    return min(max(cost / REPORT_SHARE, REPORT_SECONDS), MAX_REPORT_SECONDS)


def progress_text(lines: list[MetricLine], total: int | None) -> str:
    """`step 12 of 140: reward/mean 0.61, loss 0.02`."""
    if not lines:
        return "no step yet"
    last = lines[-1]
    numbers = ", ".join(f"{name} {last.metrics[name]:.4g}" for name in SHOWN if name in last.metrics)
    return f"step {last.step}{f' of {total}' if total else ''}: {numbers}"


def show_curve(config: Config) -> Path | None:
    """The learning curve as an image artifact that needs no file server: the picture is in its address."""
    path = draw_curve(config.job_dir, f"{config.project} / {config.name}")
    if path is not None:
        picture = base64.b64encode(path.read_bytes()).decode()
        create_image_artifact(
            f"data:image/png;base64,{picture}", key=artifact_key(config, "curve"), description="Learning curve"
        )
    return path


def show_rollouts(config: Config) -> None:
    """The newest sampled rollouts as a table."""
    found = latest_rollouts(config.job_dir)
    if found is None:
        return
    source, step, rollouts = found
    table = f"## {source}, step {step}\n\n{rollouts_table(rollouts)}\n"
    create_markdown_artifact(table, key=artifact_key(config, "rollouts"), description="Sampled rollouts")


def show_tracking(config: Config, link: str) -> None:
    """Where the numbers are: a link, or the command that opens them."""
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


def show_summary(config: Config, summary: dict[str, Any]) -> None:
    """A run's results as a two-column table."""
    rows = "\n".join(f"| {name} | {_shown(value)} |" for name, value in summary.items() if value not in (None, "", {}))
    text = f"## {config.project} / {config.name}\n\n| | |\n| --- | --- |\n{rows}\n"
    create_markdown_artifact(text, key=artifact_key(config, "summary"), description="Summary")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "<br>".join(f"{name} {_shown(part)}" for name, part in value.items())
    return str(value)
