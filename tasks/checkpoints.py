"""The tasks `publish`, which ends a run or a pipeline, and `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.reports import show_picture, show_rollouts, show_summary, show_tracking, shown_if_possible
from trinity_core.runtime.pipeline import Plan, pipeline_summary
from trinity_core.runtime.session import Session
from trinity_core.runtime.summary import summarise, write_summary


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish(session: Session, results: dict[str, Any]) -> dict[str, Any]:
    """Convert the last checkpoint, write the job's `summary.json` and show it as artifacts."""
    config = session.config
    summary = summarise(session, results)
    with shown_if_possible():
        if summary["curve"]:
            show_picture(config, Path(summary["curve"]))
        show_rollouts(config)
        show_tracking(config, summary["tracking"])
        show_summary(config, {name: value for name, value in summary.items() if name != "results"})
    return summary


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish_pipeline(plan: Plan, before: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write the pipeline's `summary.json` and show it."""
    summary = pipeline_summary(plan, before, summaries)
    write_summary(plan.config, summary)
    with shown_if_possible():
        show_summary(plan.config, summary)
    return summary


@task(name="convert", cache_policy=NO_CACHE, persist_result=False)
def convert_folder(checkpoint_dir: str, base_model_dir: str | None = None) -> list[str]:
    """Convert every checkpoint below a folder to Hugging Face format; the folders made."""
    from trinity_core.checkpoints.convert import convert_all

    return [
        str(folder) for folder in convert_all(Path(checkpoint_dir), Path(base_model_dir) if base_model_dir else None)
    ]
