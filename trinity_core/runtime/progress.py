"""Progress of a run as lines of text, from the metrics that its actors write."""

from __future__ import annotations

import logging
import time

from trinity_core.config import Config
from trinity_core.tracking.metrics_file import MetricLine, read_metrics

log = logging.getLogger(__name__)

REPORT_SECONDS, MAX_REPORT_SECONDS = 10.0, 60.0
"""Between two reports, at least and at most."""
REPORT_SHARE = 0.01
"""Of the time that reports may take: those of Prefect cost up to a second, on cores that engines and trainer want."""
SHOWN = (
    "reward/mean", "accuracy/mean", "actor/final_loss", "actor/grad_norm", "response_length/mean",
    "tokens_per_second", "time/step", "timing_s/step",
)  # fmt: skip
"""The metrics of a line of progress, as far as they exist."""


class ProgressReport:
    """Logs how far one source of metrics is: as often as `REPORT_SHARE` allows, and only what has changed."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source
        self.total_steps: int | None = None
        self._step = -1
        self._due = 0.0

    def report_if_due(self) -> None:
        """Report if enough time has passed since the last report."""
        began = time.monotonic()
        if began >= self._due:
            self.report()
            self._due = time.monotonic() + pause_after(time.monotonic() - began)

    def report(self, done: bool = False) -> None:
        """Report now, if there are steps that have not been reported; or `done`, the last time."""
        lines = [line for line in read_metrics(self.config.job_dir) if line.source == self.source]
        if not lines or (lines[-1].step == self._step and not done):
            return
        self._step = step = lines[-1].step
        percent = 100.0 if done else min(100.0 * step / self.total_steps, 100.0) if self.total_steps else 0.0
        self.show(progress_text(lines, self.total_steps), percent)

    def show(self, text: str, percent: float) -> None:
        """Show one report."""
        log.info("%s: %s", self.source, text)


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
