"""The `monitor`, `service`, `data_processor` and `log` sections: what surrounds training."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from trinity_core.config.section import Section
from trinity_core.config.types import EMPTY, Args, Count, Flag, Integer, Many, Named


class MonitorConfig(Section):
    """Where metrics go. They are also kept in the run's `monitor/metrics.jsonl`."""

    monitor_type: str = "mlflow"
    """The tracking system."""
    monitor_args: Named[str | None] = EMPTY
    """`mlflow`: `uri`, `username`, `password`; `wandb`: `base_url`, `api_key`, `mode`."""
    enable_ray_timeline: Flag = False
    """Write `monitor/timeline.json`, to be viewed in Chrome at chrome://tracing."""


class DataJuicerConfig(Section):
    """A Data-Juicer server."""

    server_url: str | None = None
    """Address of a running server, unless `auto_start`."""
    auto_start: Flag = False
    """Start a server for the run; also without a `server_url`."""
    port: Annotated[Integer, Ge(1), Le(65535)] = 5005
    """Port of the server that is started."""


class ServiceConfig(Section):
    """Services a run uses."""

    data_juicer: DataJuicerConfig | None = None
    """Data-Juicer, for its operators."""


class OperatorConfig(Section):
    """One step of a data pipeline."""

    name: str = ""
    """Registered name of the operator, or `package.module.Class`."""
    args: Args = EMPTY
    """Arguments of the operator."""


class TaskPipelineConfig(Section):
    """Prepares tasks before the run."""

    num_process: Count = 4
    """Processes that work on it."""
    operators: Many[OperatorConfig] = ()
    """Steps, in order."""
    inputs: Many[str] = ()
    """Data sets it reads; its output becomes the explorer's input."""
    target_fields: Many[str] = ()
    """Columns it works on."""


class ExperiencePipelineConfig(Section):
    """Works on experiences between explorer and trainer."""

    operators: Many[OperatorConfig] = ()
    """Steps, in order."""
    save_input: Flag | None = None
    """Write what the operators are given to a file of JSON lines; by default where `input_save_path` is given."""
    input_save_path: str | None = None
    """That file, or a folder in which it is called after the explorer; by default in the run's `buffer` folder."""


class DataProcessorConfig(Section):
    """Pipelines over tasks and experiences."""

    task_pipeline: TaskPipelineConfig | None = None
    """Prepares tasks before the run."""
    experience_pipeline: ExperiencePipelineConfig | None = None
    """Works on experiences between explorer and trainer."""


class LogConfig(Section):
    """Logs of the actors, under the run's `log` folder."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe level that is logged."""
    group_by_node: Flag = False
    """A folder for each node."""
