"""The task `curate`: a configuration's task pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.reports import show_summary, shown_if_possible
from tasks.run_names import label_run
from trinity_core.errors import TrinityError
from trinity_core.pipelines.tasks import curated_tasks
from trinity_core.runtime.asked_models import RunModels
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.stage import pick_stage


@task(name="curate", cache_policy=NO_CACHE, persist_result=False)
def curate_tasks(config: str, overrides: Sequence[str] = (), stage: str = "") -> dict[str, Any]:
    """Make, continue or find the output of the pipeline; where it is, and what became of the rows.

    Raises ConfigError for a configuration that is wrong, and TrinityError as `curate` does.
    """
    chosen, _ = pick_stage(load_checked(config, list(overrides)), stage)
    label_run(chosen.project, chosen.name, "curate")
    if chosen.data_processor.task_pipeline is None:
        raise TrinityError(f"{config} has no data_processor.task_pipeline, so there is nothing to curate.")
    with RunModels(chosen) as models:
        made = curated_tasks(chosen, models)
    summary = {**vars(made), "folder": str(made.folder)}
    get_run_logger().info("%d of %d rows in %s", made.rows, made.read, made.folder)
    with shown_if_possible():
        show_summary(chosen, summary)
    return summary
