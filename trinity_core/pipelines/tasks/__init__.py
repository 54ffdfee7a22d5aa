"""The task pipeline: operators on rows before a run. Importing this package registers the built-in ones."""

from trinity_core.pipelines.tasks import asking, filters
from trinity_core.pipelines.tasks.curation import (
    CuratedDataset,
    TaskPipeline,
    asked_models,
    curate,
    curated_tasks,
    with_curated_tasks,
)
from trinity_core.pipelines.tasks.task_operator import TASK_OPERATORS, Memory, TaskOperator

__all__ = [
    "TASK_OPERATORS",
    "CuratedDataset",
    "Memory",
    "TaskOperator",
    "TaskPipeline",
    "asked_models",
    "asking",
    "curate",
    "curated_tasks",
    "filters",
    "with_curated_tasks",
]
