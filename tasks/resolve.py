"""The task `resolve`: from a YAML file to a run that can start. All that can be known to be wrong is said here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.run_names import label_run
from trinity_core.checkpoints.resume import claim, fresh_name, latest_whole, other_beginning
from trinity_core.config import Config, notices, stages, store_url
from trinity_core.errors import TrinityError
from trinity_core.runlock import LINGER_SECONDS, TRAINER, hold, release
from trinity_core.runtime.cluster import placement_of
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.placement import parts_of, start_from, sync_method
from trinity_core.runtime.session import Stage, holders
from trinity_core.store.store import ExperienceStore
from trinity_core.sync.methods import run_versions
from trinity_core.tracking import rewind

OTHER_MODEL = (
    "The checkpoints of this run began from the model %s; its weights go on, and those of model.model_path %s are not "
    "trained. To start from them, give the run another `name` or set `continue_from_checkpoint: false`."
)


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
    """Load and check the configuration, pick a stage, share out the machine, find the checkpoint to go on from.

    `kind` is the flow's name. `model_path` is the model of the stage before, where there is one. With `base` the model
    before all stages is meant, whose scores belong to the pipeline. `run` is the run's name where it is not the
    configuration's: one in a fresh folder. Raises ConfigError or TrinityError.
    """
    loaded = load_checked(config, list(overrides))
    found, parent_dir = pick_stage(loaded, stage)
    if base and parent_dir:
        found, parent_dir = found.with_values({"name": loaded.name}), None
    if run:
        found = found.with_values({"name": run})
    if model_path:
        found = start_from(found, model_path)
    if kind != "evaluate" or (parent_dir and model_path):
        found = in_fresh_folder(found)
    if kind == "evaluate":
        found = found.with_values({"mode": "bench"})
    placement = placement_of(found)
    method, notice = sync_method(found, placement)
    found = found.with_values({"synchronizer.sync_method": method})
    for each in (*notices(found), *([notice] if notice else [])):
        get_run_logger().warning(each)
    label_run(found.project, found.name, stage or kind, f"algorithm:{found.algorithm.algorithm_type}")
    step = 0 if kind == "evaluate" else resume_step(found, parts_of(found, placement))
    if step:
        get_run_logger().info("Going on from the checkpoint of step %s in %s", step, found.job_dir)
        if began := other_beginning(found.job_dir, found.model.model_path):
            get_run_logger().warning(OTHER_MODEL, began, found.model.model_path)
    return Stage(found, placement, stage or kind, parent_dir, step)


def pick_stage(config: Config, stage: str) -> tuple[Config, Path | None]:
    """The stage of that name and the pipeline's folder; the configuration itself where it has no stages."""
    if not config.stages:
        return config, None
    names = [each.stage_name for each in config.stages]
    if stage not in names:
        fault = f"{stage!r} is none of them" if stage else "name one"
        raise TrinityError(
            f"The configuration has the stages {', '.join(names)}; {fault}. The flow `pipeline` runs all of them."
        )
    return stages(config)[names.index(stage)], config.job_dir


def in_fresh_folder(config: Config) -> Config:
    """With `continue_from_checkpoint: false` a run whose folder is taken gets a folder of its own, `<name>_<time>`.

    A retry goes on in the folder that its flow run has begun.
    """
    if config.continue_from_checkpoint:
        return config
    begun_by = flow_run.root_flow_run_id or ""
    fresh = config.with_values({"name": fresh_name(config.job_dir.parent, config.name, begun_by)})
    claim(fresh.job_dir, config.name, begun_by)
    return fresh


def hold_run(config: Config, parts: set[str]) -> None:
    """Keep others from beginning the same run: they would take back steps that this one has done.

    Waits for a trainer that has outlived its flow. Raises TrinityError where the run is going on.
    """
    for name in holders(config, parts):
        hold(config.job_dir, name)
    if "train" in parts:
        hold(config.job_dir, TRAINER, LINGER_SECONDS)
        release(config.job_dir, TRAINER)


def resume_step(config: Config, parts: set[str]) -> int:
    """The step of the latest whole checkpoint, 0 where there is none; what came after it is forgotten.

    The trainer does the same for the store when it starts. Done here, before the explorer starts, it saves the explorer
    from beginning with a step that is taken back. Where the explorer runs as a flow of its own, both go on as they are.
    """
    begun = config.job_dir.exists()
    hold_run(config, parts)
    step = latest_whole(config.job_dir) or 0
    if "explore" not in parts or "train" not in parts or not begun:
        return step
    run_versions(config).rewind(step)
    (config.job_dir / "buffer").mkdir(exist_ok=True)
    with ExperienceStore.open(store_url(config), str(config.job_dir)) as store:
        store.rewind(step)
        store.expect(config.explorer.name)
        explorer_step = store.position(config.explorer.name).step
    rewind(config.job_dir, step, explorer_step)
    return step
