"""From a configuration to a stage that can start: which stage, on which machine, from which checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trinity_core.checkpoints.resume import claim, fresh_name, latest_whole, other_beginning
from trinity_core.config import Config, notices, stages, store_url
from trinity_core.config.external_rules import key_of_endpoint
from trinity_core.errors import TrinityError
from trinity_core.pipelines.tasks import with_curated_tasks
from trinity_core.runlock import LINGER_SECONDS, TRAINER, hold, release
from trinity_core.runtime.agreement import agree
from trinity_core.runtime.asked_models import RunModels
from trinity_core.runtime.cluster import placement_of
from trinity_core.runtime.configuration import start_from
from trinity_core.runtime.placement import Placement, components_of, flow_of, sync_method
from trinity_core.runtime.readiness import require_ready
from trinity_core.runtime.verdicts import with_verdicts
from trinity_core.store.store import ExperienceStore
from trinity_core.sync.methods import run_versions
from trinity_core.tracking import rewind

log = logging.getLogger(__name__)

OTHER_MODEL = (
    "The checkpoints of this run began from the model %s; those weights are trained further, and not those of model."
    "model_path %s. To start from that model, give the run another `name` or set `continue_from_checkpoint: false`."
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One run, ready to start."""

    config: Config
    placement: Placement
    stage: str
    """`rft`, `sft`, `evaluate` …, or the stage's name in a pipeline."""
    parent_dir: Path | None = None
    """The pipeline's folder."""
    resumed_step: int = 0
    """The checkpoint that the run resumes from; 0 for a new run."""
    warnings: tuple[str, ...] = ()
    """What the user should know before the stage starts, such as settings without effect."""


def resolve_stage(loaded: Config, stage: str = "", model_path: str = "") -> Stage:
    """`choose_stage`, then `resume`: one stage of a checked configuration, ready to start. Its warnings are logged."""
    resolved = resume(choose_stage(loaded, stage, model_path))
    resolved = replace(resolved, config=with_verdicts(resolved.config))
    for warning in resolved.warnings:
        log.warning(warning)
    if resolved.resumed_step:
        log.info("Resuming from the checkpoint of step %s in %s", resolved.resumed_step, resolved.config.job_dir)
    return resolved


def choose_stage(
    loaded: Config,
    stage: str = "",
    model_path: str = "",
    kind: str = "",
    base: bool = False,
    run: str = "",
    begun_by: str = "",
) -> Stage:
    """Pick a stage of a checked configuration, open what it names, and share out the machine. Raises TrinityError.

    `kind` is the flow's name; by default, the one that runs the stage. `model_path` is the model of the stage before,
    if any. With `base`, the model before all stages is meant, whose scores belong to the pipeline. `run` is the run's
    name where it is not the configuration's: one in a fresh folder. `begun_by` identifies the attempts at one run,
    which share a fresh folder. A task pipeline whose output the stage reads is run here, unless that is there already.
    """
    config, parent_dir = pick_stage(loaded, stage)
    kind = kind or flow_of(config)
    if base and parent_dir:
        config, parent_dir = config.with_values({"name": loaded.name}), None
    if run:
        config = config.with_values({"name": run})
    if model_path:
        config = start_from(config, model_path)
    if kind != "evaluate" or (parent_dir and model_path):
        config = in_fresh_folder(config, begun_by)
    if kind == "evaluate":
        config = for_evaluation(config, base)
    require_ready(config)
    placement = placement_of(config)
    method, notice = sync_method(config, placement)
    config = config.with_values({"synchronizer.sync_method": method})
    warnings = (*notices(config), *([notice] if notice else []))
    with RunModels(config) as models:
        config = with_curated_tasks(config, models)
    return Stage(config, placement, stage or kind, parent_dir, warnings=warnings)


def for_evaluation(config: Config, base: bool = False) -> Config:
    """The configuration in mode `bench`; with `base`, of the model even where an external one is named.

    The scores of an external model are a run of their own, `<name>_<model_name>`. Raises TrinityError if its key is not
    set where Ray is started here; elsewhere, the explorer looks for it.
    """
    external = None if base else config.explorer.external_model
    config = config.with_values({"mode": "bench", "explorer.external_model": external})
    if external is None:
        return config
    if not config.cluster.ray_address:
        key_of_endpoint(config)
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", external.model_name).strip("-.")
    return config.with_values({"name": f"{config.name}_{model}"})


def resume(stage: Stage) -> Stage:
    """Lock the run and find the checkpoint that it resumes from. Raises TrinityError if the run is in progress."""
    config = stage.config
    step = 0 if config.mode == "bench" else resume_step(config, components_of(config, stage.placement))
    if step and (began := other_beginning(config.job_dir, config.model.model_path)):
        return replace(
            stage, resumed_step=step, warnings=(*stage.warnings, OTHER_MODEL % (began, config.model.model_path))
        )
    return replace(stage, resumed_step=step)


def stage_names(config: Config) -> Sequence[str]:
    """The names of a configuration's stages in order; one empty name for a configuration without stages."""
    return [each.stage_name for each in config.stages] or [""]


def pick_stage(config: Config, stage: str) -> tuple[Config, Path | None]:
    """The stage of that name and the pipeline's folder; the configuration itself where it has no stages."""
    if not config.stages:
        return config, None
    names = stage_names(config)
    if stage not in names:
        fault = f"{stage!r} is none of them" if stage else "name one"
        raise TrinityError(
            f"The configuration has the stages {', '.join(names)}; {fault}. The flow `pipeline` runs all of them."
        )
    return stages(config)[names.index(stage)], config.job_dir


def job_dir_of(config: Config, stage: str = "") -> Path:
    """The folder of a configuration's run; of several stages, that of `stage`, or of the last one that trains."""
    if stage:
        return pick_stage(config, stage)[0].job_dir
    found = stages(config)
    trained = [each for each in found if each.mode in ("both", "train")]
    return (trained or found)[-1].job_dir


def in_fresh_folder(config: Config, begun_by: str) -> Config:
    """With `continue_from_checkpoint: false` a run whose folder is taken gets a folder of its own, `<name>_<time>`.

    A retry, which has the same `begun_by`, resumes in the folder of the first attempt.
    """
    if config.continue_from_checkpoint:
        return config
    fresh = config.with_values({"name": fresh_name(config.job_dir.parent, config.name, begun_by)})
    claim(fresh.job_dir, config.name, begun_by)
    return fresh


def lock_names(config: Config, components: set[str]) -> list[str]:
    """The locks that a run of these components holds. Each explorer of a run has a lock of its own."""
    names = {"train": "training", "explore": f"explorer_{config.explorer.name}"}
    return [names[each] for each in sorted(components)]


def lock_run(config: Config, components: set[str]) -> None:
    """Keep others from starting the same run: they would take back steps that this one has done.

    Waits for a trainer that has outlived its flow. Raises TrinityError if the run is in progress, or if an explorer or
    trainer of it is at work whose settings do not go with these.
    """
    names = lock_names(config, components)
    for name in names:
        hold(config.job_dir, name)
    agree(config, names)
    if "train" in components:
        hold(config.job_dir, TRAINER, LINGER_SECONDS)
        release(config.job_dir, TRAINER)


def resume_step(config: Config, components: set[str]) -> int:
    """The step of the latest whole checkpoint, 0 if there is none; what came after it is rewound. Locks the run.

    The trainer rewinds the store too when it starts. Done here, before the explorer starts, it keeps the explorer from
    beginning a step that would then be taken back. An explorer or trainer that runs alone rewinds nothing here. An
    explorer says here that it comes (back), so that a trainer that is ready before its engines waits for it.
    """
    begun = config.job_dir.exists()
    lock_run(config, components)
    step = latest_whole(config.job_dir) or 0
    if "explore" not in components or not begun:
        return step
    (config.job_dir / "buffer").mkdir(exist_ok=True)
    with ExperienceStore.open(store_url(config), str(config.job_dir)) as store:
        store.expect(config.explorer.name)
        if "train" in components:
            store.expect_trainer()
            run_versions(config).rewind(step)
            store.rewind(step)
            rewind(config.job_dir, step, store.explorer_steps)
    return step
