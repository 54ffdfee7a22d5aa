"""The `monitor`, `service`, `data_processor` and `log` sections: what surrounds training."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from trinity_core.config.types import (
    EMPTY,
    Args,
    Flag,
    Integer,
    Many,
    Named,
    Natural,
    Number,
    Section,
)


class MonitorConfig(Section):
    """Where metrics go. They are also kept in the run's `monitor/metrics.jsonl`."""

    monitor_type: str = "mlflow"
    """The tracking system."""
    monitor_args: Named[str | None] = EMPTY
    """`mlflow`: `uri`, `username`, `password`; `wandb`: `base_url`, `api_key`, `mode`."""
    traces_per_step: Natural = 2
    """Rollouts of each explore step that MLflow shows as traces: turns, tools, rewards; 0: none."""
    prometheus_port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port at which the run serves its newest metrics for Prometheus, on 127.0.0.1; 0: none."""
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


class TaskOutputConfig(Section):
    """Where a task pipeline writes."""

    path: str | None = None
    """Folder of its data sets, each in a folder named by its fingerprint; by default `curated_tasks` next to
    the project's runs."""


class TaskPipelineConfig(Section):
    """Makes a task set of others before the run. Its output is read by the task sets that have no `path`; if there is
    none, by the training task sets whose `path` is among `inputs`."""

    inputs: Many[str] = ()
    """Local files or folders that it reads."""
    split: str = "train"
    """Split of the inputs."""
    target_fields: Many[str] = ()
    """Columns of the inputs that are kept; by default all."""
    operators: Many[OperatorConfig] = ()
    """Steps, in order."""
    priority_weights: Named[Number] = EMPTY
    """Column of numbers and its weight: rows are ordered by the weighted sum, highest first; by default as they are
    read."""
    top_k: Annotated[Integer, Ge(-1)] = -1
    """Rows of the output at most, the first in that order; -1: all."""
    test_share: Annotated[Number, Ge(0), Le(0.99)] = 0.0
    """Share of the rows that become the output's split `test`; which ones follows from their contents and the seed."""
    output: TaskOutputConfig = Field(default_factory=TaskOutputConfig)
    """Where the output goes."""


class ExperienceInputConfig(Section):
    """A data set whose rows are joined to experiences, so that operators can use its columns."""

    path: str = ""
    """File, folder, hub name, or database URL, as of a task set."""
    storage_type: Literal["file", "sql"] = "file"
    """How the rows are stored."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default the input's name."""
    split: str = "train"
    """Split of the data set."""
    join_key: str = ""
    """Column by which its rows and those of the task sets belong together, such as `id` or `question`."""
    columns: Many[str] = ()
    """Columns that are joined, as `<input>.<column>`; by default all others."""


class ExperiencePipelineConfig(Section):
    """Works on experiences between explorer and trainer."""

    inputs: Named[ExperienceInputConfig] = EMPTY
    """Data sets by name, whose rows are joined to the experiences of the tasks with the same key."""
    operators: Many[OperatorConfig] = ()
    """Steps, in order."""
    own_process: Flag = False
    """Run them in a process of their own: for those that compute for long, which would hold up the explorer."""
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
