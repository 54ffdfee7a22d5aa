"""The task `resolve`: from a YAML file to a run that can start. All that can be known to be wrong is reported here."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.reports import show_studio, shown_if_possible
from tasks.retries import patient_task
from tasks.run_names import label_run
from trinity_core.runtime import beside
from trinity_core.runtime.beside import Part
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.pipeline import Plan, plan_stages
from trinity_core.runtime.stage import Stage, choose_stage, resume


@task(name="resolve", cache_policy=NO_CACHE, persist_result=False)
def resolve(
    config: str,
    overrides: Sequence[str] = (),
    stage: str = "",
    model_path: str = "",
    kind: str = "rft",
    base: bool = False,
    run: str = "",
) -> Stage:
    """Load and check the configuration, choose a stage and find the checkpoint to resume from.

    `kind` is the flow's name; the other arguments are those of `choose_stage`. Raises ConfigError or TrinityError.
    """
    loaded = load_checked(config, list(overrides))
    chosen = choose_stage(loaded, stage, model_path, kind, base, run, flow_run.root_flow_run_id or "")
    settings = chosen.config
    label_run(settings.project, settings.name, chosen.stage, f"algorithm:{settings.algorithm.algorithm_type}")
    with shown_if_possible():
        show_studio(settings)
    resumed = resume(chosen)
    for warning in resumed.warnings:
        get_run_logger().warning(warning)
    if resumed.resumed_step:
        get_run_logger().info("Resuming from the checkpoint of step %s in %s", resumed.resumed_step, settings.job_dir)
    return resumed


@patient_task("resolve")
def plan_pipeline(config: str, overrides: Sequence[str] = ()) -> Plan:
    """Load and check the configuration with all its stages. Raises ConfigError or TrinityError."""
    loaded = load_checked(config, list(overrides))
    label_run(loaded.project, loaded.name, "pipeline")
    with shown_if_possible():
        show_studio(loaded)
    return plan_stages(loaded)


@patient_task("resolve")
def plan_parts(configs: Sequence[str], overrides: Sequence[str] = ()) -> list[Part]:
    """Load and check the configurations of runs beside each other. Raises ConfigError or TrinityError."""
    parts = beside.plan_parts(configs, overrides)
    label_run(parts[0].config.project, parts[0].config.name, "async")
    return parts
