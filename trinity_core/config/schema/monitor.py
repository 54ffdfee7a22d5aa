"""The `monitor`, `service`, `data_processor` and `log` sections: what surrounds training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trinity_core.config.types import Args, Count, Range

MONITOR_ARGS: dict[str, tuple[str, ...]] = {
    "mlflow": ("uri", "username", "password"),
    "wandb": ("base_url", "api_key", "mode"),
    "tensorboard": (),
}
"""What `monitor_args` may hold, by `monitor_type`."""


@dataclass(slots=True)
class MonitorConfig:
    """Where metrics go. They are also kept in the run's `monitor/metrics.jsonl`."""

    monitor_type: Literal["mlflow", "tensorboard", "wandb"] = "mlflow"
    """The tracking system."""
    monitor_args: dict[str, str | None] = field(default_factory=dict)
    """`mlflow`: `uri`, `username`, `password`; `wandb`: `base_url`, `api_key`, `mode`."""
    enable_ray_timeline: bool = False
    """Write `monitor/timeline.json`, to be viewed in Chrome at chrome://tracing."""


@dataclass(slots=True)
class DataJuicerConfig:
    """A Data-Juicer server."""

    server_url: str | None = None
    """Address of a running server."""
    auto_start: bool = False
    """Start a server for the run."""
    port: Annotated[int, Range(1, 65535)] = 5005
    """Port of the server that is started."""


@dataclass(slots=True)
class ServiceConfig:
    """Services a run uses."""

    data_juicer: DataJuicerConfig | None = None
    """Data-Juicer, for its operators."""


@dataclass(slots=True)
class OperatorConfig:
    """One step of a data pipeline."""

    name: str = ""
    """Registered name of the operator, or `package.module.Class`."""
    args: Args = field(default_factory=dict)
    """Arguments of the operator."""


@dataclass(slots=True)
class TaskPipelineConfig:
    """Prepares tasks before the run."""

    num_process: Count = 4
    """Processes that work on it."""
    operators: list[OperatorConfig] = field(default_factory=list)
    """Steps, in order."""
    inputs: list[str] = field(default_factory=list)
    """Data sets it reads; its output becomes the explorer's input."""
    target_fields: list[str] = field(default_factory=list)
    """Columns it works on."""


@dataclass(slots=True)
class ExperiencePipelineConfig:
    """Works on experiences between explorer and trainer."""

    operators: list[OperatorConfig] = field(default_factory=list)
    """Steps, in order."""


@dataclass(slots=True)
class DataProcessorConfig:
    """Pipelines over tasks and experiences."""

    task_pipeline: TaskPipelineConfig | None = None
    """Prepares tasks before the run."""
    experience_pipeline: ExperiencePipelineConfig | None = None
    """Works on experiences between explorer and trainer."""


@dataclass(slots=True)
class LogConfig:
    """Logs of the actors, under the run's `log` folder."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    group_by_node: bool = False
    """A folder for each node."""
