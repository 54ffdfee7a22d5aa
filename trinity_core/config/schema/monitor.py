"""The `monitor`, `service`, `data_processor` and `log` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from trinity_core.config.types import (
    EMPTY,
    Args,
    Count,
    Flag,
    Integer,
    Many,
    Named,
    Natural,
    Number,
    Positive,
    Seconds,
    Section,
    Share,
)


class BudgetConfig(Section):
    """What may be spent, counting all attempts; tokens and requests without those of undone steps."""

    tokens: Count | None = None
    """Sampled tokens; for supervised runs, tokens trained on."""
    judge_calls: Count | None = None
    """Requests to judges (`llm_judge`), with those of evaluations."""
    hours: Positive | None = None
    """Hours of work, without the time between attempts."""
    gpu_hours: Positive | None = None
    """Hours times GPUs of the run."""
    price: Positive | None = None
    """Money, at `cluster.price_per_hour`."""


class StopConfig(BudgetConfig):
    """Ends a stage early: it saves, is evaluated, and completes with the reason."""

    patience: Count | None = None
    """Evaluations in a row of which none is better than the best one before them, by the 95 % interval of the
    difference paired by task."""
    target: Share | None = None
    """Score that is enough."""
    pipeline: BudgetConfig = Field(default_factory=BudgetConfig)
    """Budgets of all stages together. Once one is spent, no further stage trains."""


class PauseConfig(Section):
    """Pauses a run until a person decides to continue, to change settings, or to stop."""

    after_steps: Many[Count] = ()
    """Train steps after which the run saves and waits."""
    at_findings: Flag = False
    """Also save and wait when the doctor finds something during the run, once for each of its checks."""
    timeout: Seconds = 86400.0
    """Time for a decision on Prefect's page. After that the run ends, and its next start asks again."""


class MonitorConfig(Section):
    """Where metrics are sent. They are also stored in the run's `monitor/metrics.jsonl`."""

    monitor_type: str = "mlflow"
    """The tracking system."""
    monitor_args: Named[str | None] = EMPTY
    """`mlflow`: `uri`, `username`, `password`; `wandb`: `base_url`, `api_key`, `mode`."""
    traces_per_step: Natural = 2
    """Rollouts per explore step that MLflow shows as traces: turns, tools, rewards; 0: none."""
    prometheus_port: Annotated[Integer, Ge(0), Le(65535)] = 0
    """Port on 127.0.0.1 where the run serves its newest metrics for Prometheus; 0: none."""
    stop: StopConfig = Field(default_factory=StopConfig)
    """When a stage ends before its last step."""
    pause: PauseConfig = Field(default_factory=PauseConfig)
    """When a stage waits for a person."""
    enable_ray_timeline: Flag = False
    """Write `monitor/timeline.json`, for Chrome's chrome://tracing."""


class DataJuicerConfig(Section):
    """A Data-Juicer server."""

    server_url: str | None = None
    """Address of a running server; not needed with `auto_start`."""
    auto_start: Flag = False
    """Start a server for the run."""
    port: Annotated[Integer, Ge(1), Le(65535)] = 5005
    """Port of the started server."""


class ServiceConfig(Section):
    """Services a run uses."""

    data_juicer: DataJuicerConfig | None = None
    """Data-Juicer server for its operators."""


class OperatorConfig(Section):
    """One step of a data pipeline."""

    name: str = ""
    """Registered name of the operator, or `package.module.Class`."""
    args: Args = EMPTY
    """Arguments of the operator."""


class TaskOutputConfig(Section):
    """Where a task pipeline writes its output."""

    path: str | None = None
    """Folder of its data sets, each in a subfolder named by its fingerprint; by default `curated_tasks` next to the
    project's runs."""


class TaskPipelineConfig(Section):
    """Creates a task set from others before the run. Task sets without a `path` read its output; if there are none, the
    training task sets whose `path` is among `inputs` do."""

    inputs: Many[str] = ()
    """Local files or folders to read."""
    split: str = "train"
    """Split of the inputs."""
    target_fields: Many[str] = ()
    """Columns of the inputs to keep; by default all."""
    operators: Many[OperatorConfig] = ()
    """Operators, in order."""
    priority_weights: Named[Number] = EMPTY
    """Numeric column → weight: rows are sorted by the weighted sum, highest first; by default they keep their order."""
    top_k: Annotated[Integer, Ge(-1)] = -1
    """Maximum number of output rows, the first in that order; -1: all."""
    test_share: Annotated[Number, Ge(0), Le(0.99)] = 0.0
    """Share of the rows that become the output's split `test`; the choice depends on their contents and the seed."""
    output: TaskOutputConfig = Field(default_factory=TaskOutputConfig)
    """Where to write the output."""


class ExperienceInputConfig(Section):
    """A data set whose rows are joined to experiences, so that operators can use its columns."""

    path: str = ""
    """File, folder, hub name, or database URL, as for a task set."""
    storage_type: Literal["file", "sql"] = "file"
    """How the rows are stored."""
    subset_name: str | None = None
    """Subset of a hub data set; table of a database, by default the input's name."""
    split: str = "train"
    """Split of the data set."""
    join_key: str = ""
    """Column that matches its rows with those of the task sets, such as `id` or `question`."""
    columns: Many[str] = ()
    """Columns to join, as `<input>.<column>`; by default all others."""


class ExperiencePipelineConfig(Section):
    """Processes experiences between explorer and trainer."""

    inputs: Named[ExperienceInputConfig] = EMPTY
    """Data sets by name, whose rows are joined to the experiences of tasks with the same key."""
    operators: Many[OperatorConfig] = ()
    """Operators, in order."""
    own_process: Flag = False
    """Run the operators in a separate process, so that slow ones do not hold up the explorer."""
    save_input: Flag | None = None
    """Write the operators' input to a JSON lines file; by default if `input_save_path` is given."""
    input_save_path: str | None = None
    """That file, or a folder in which it is named after the explorer; by default in the run's `buffer` folder."""


class DataProcessorConfig(Section):
    """Pipelines over tasks and experiences."""

    task_pipeline: TaskPipelineConfig | None = None
    """Prepares tasks before the run."""
    experience_pipeline: ExperiencePipelineConfig = Field(default_factory=ExperiencePipelineConfig)
    """Processes experiences between explorer and trainer."""


class LogConfig(Section):
    """Logs of the actors, under the run's `log` folder."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
    group_by_node: Flag = False
    """Use one folder per node."""
