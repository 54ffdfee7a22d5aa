"""The stages of a pipeline: what they are, which are done, and what remains of them at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.checkpoints import digest_of, read_summary, write_summary
from tasks.reports import show_summary
from tasks.run_names import label_run
from trinity_core.config import Config, stages
from trinity_core.runtime.cluster import close_cluster, open_cluster, placement_of
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.placement import flow_of, start_from


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One subflow of a pipeline."""

    name: str
    """The stage's name in the configuration."""
    flow: str
    """`sft`, `rft` or `evaluate`."""
    config: Config
    done: dict[str, Any] | None
    """The summary of a stage that an earlier attempt has finished."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline that can start."""

    config: Config
    stages: list[PlannedStage]
    evaluates: str
    """The stage whose eval sets score the model before training; "" where there are none."""
    gpu_per_node: int


@task(name="resolve", cache_policy=NO_CACHE, persist_result=False)
def plan_pipeline(config: str, overrides: Sequence[str] = ()) -> Plan:
    """Load and check the configuration with all its stages. Raises ConfigError or TrinityError."""
    loaded = load_checked(config, list(overrides))
    label_run(loaded.project, loaded.name, "pipeline")
    names = [each.stage_name for each in loaded.stages] or [""]
    parts = stages(loaded)
    done = finished(parts)
    planned = [PlannedStage(*each) for each in zip(names, map(flow_of, parts), parts, done, strict=True)]
    with_eval = [each.name for each in planned if each.config.buffer.explorer_input.eval_tasksets]
    return Plan(loaded, planned, with_eval[-1] if with_eval else "", gpus_of(parts))


def finished(parts: list[Config]) -> list[dict[str, Any] | None]:
    """The summary of each stage that is done; from the first one that is not, or was made from other settings, None.

    A stage that is run again goes on from its latest checkpoint.
    """
    found: list[dict[str, Any] | None] = []
    model_path = ""
    for part in parts:
        summary = read_summary(part) if part.continue_from_checkpoint and None not in found else None
        if summary is not None and model_path:
            part = start_from(part, model_path)
        if summary is not None and summary.get("made_from") != digest_of(part):
            get_run_logger().warning("%s has been run with other settings: it goes on from its checkpoint", part.name)
            summary = None
        found.append(summary)
        model_path = (summary or {}).get("hf_dir") or model_path
    return found


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def finish_pipeline(plan: Plan, before: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The pipeline's summary: scores, steps and seconds by stage, and where the model is that the last trained."""
    last = list(summaries.values())[-1]
    trained = [each for each in summaries.values() if each["hf_dir"]] or [last]
    summary = {
        **{name: value for name, value in trained[-1].items() if name != "results"},
        "name": plan.config.name,
        "score": last["score"],
        "scores": scores_by_stage(before, summaries),
        "steps": {name: each["step"] for name, each in summaries.items()},
        "stage_seconds": {"before": before.get("seconds", 0.0)}
        | {name: each["seconds"] for name, each in summaries.items()},
    }
    show_summary(plan.config, summary)
    write_summary(plan.config, summary)
    return summary


@contextmanager
def early_cluster(config: Config) -> Iterator[None]:
    """Ray, before there is a flow that needs it: started while something else is waited for."""
    opened = open_cluster(config, gpus_of(stages(config)))
    try:
        yield
    finally:
        close_cluster(opened)


def gpus_of(parts: list[Config]) -> int:
    """GPUs of each node that the most demanding of these runs takes."""
    return max(placement_of(part).gpu_per_node for part in parts)


def scores_by_stage(before: dict[str, Any], summaries: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """`before` and each stage's name -> score. A stage that evaluates nothing has the next one's score at step 0."""
    found: dict[str, float | None] = {"before": before.get("score")}
    following: float | None = None
    for name, summary in reversed(summaries.items()):
        found[name] = following if summary["score"] is None else summary["score"]
        following = summary["scores"].get("step 0")
    return found
