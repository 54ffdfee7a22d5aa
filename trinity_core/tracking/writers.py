"""Where metrics are forwarded to: one small interface, one class for each kind of tracking."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trinity_core.registry import Registry
from trinity_core.tracking.metrics_file import MetricLine, stream_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracking system is told of a run."""

    project: str
    """The experiment (MLflow) or project (W&B)."""
    name: str
    """The run's name."""
    job_dir: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole configuration; secrets are masked before they leave this process."""
    parent_dir: Path | None = None
    """The job dir of the pipeline that this run is a stage of."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """`monitor.monitor_args`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    keeps_status: bool = False
    """An evaluation: a run that it finds stays as it was, for others may be at work in it."""


class Writer(Protocol):
    """Forwards what a run has written. A method that raises one of `faults` may be called again later."""

    faults: tuple[type[Exception], ...]
    """What the tracking system raises while it cannot be reached."""

    def log(self, lines: Sequence[MetricLine]) -> None:
        """Forward these numbers."""

    def artifact(self, path: Path, folder: str = "") -> None:
        """Keep a small file with the run."""

    def checkpoint(self, step: int, path: Path) -> None:
        """A whole checkpoint has appeared."""

    def score(self, step: int, value: float) -> bool:
        """The eval's score of a whole checkpoint; False where that is not registered yet."""
        ...

    def close(self, succeeded: bool) -> None:
        """The run has ended (for now)."""

    @property
    def link(self) -> str:
        """Where a person finds the run: an address, or the command that opens it."""


MONITORS: Registry[Callable[..., Writer]] = Registry("monitor", leading=2)
"""By name: (info, checkpoint_root_dir, **monitor_args) -> Writer. Libraries are imported when a writer opens."""


def read_note(path: Path) -> dict[str, Any]:
    """What a writer has noted in the job dir; empty where there is no note, or, with a warning, no whole one."""
    try:
        note = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        log.warning("%s cannot be read (%s): tracking begins a new run", path, error)
        return {}
    return note if isinstance(note, dict) else {}


def full_names(line: MetricLine) -> dict[str, float]:
    """The line's metrics by their full names, such that no two sources share one.

    Trainer and evals keep their own names (`response_length/mean`, `eval/…`); an explorer's, many of which the trainer
    has too, and names without a group are put below their source.
    """
    below = stream_of(line.source) == "explorer"
    own = {name: f"{line.source}/{name}" if below or "/" not in name else name for name in line.metrics}
    return {own[name]: value for name, value in line.metrics.items()}
