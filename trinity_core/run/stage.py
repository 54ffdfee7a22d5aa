"""Turns a configuration into a stage that can start: which stage, on which machine, from which checkpoint."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trinity_core.algorithms.objective import Objective
from trinity_core.base.errors import DataError, TrinityError, on_failure
from trinity_core.base.files import private_folder
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import LINGER_SECONDS, PIPELINE, RUN_TRAINS, TRAINER_PROCESS, hold, is_held, release
from trinity_core.config import Config, notices, stages, store_url
from trinity_core.config.paths import uses_pipeline
from trinity_core.config.rules.explorer import key_of_endpoint
from trinity_core.config.secrets import without_password
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.exchange.checkpoints.beginning import (
    OTHER_BASE,
    OTHER_REFERENCE,
    OTHER_START,
    Beginning,
    begin_from,
    other_beginning,
    refuse_other_model,
)
from trinity_core.exchange.checkpoints.resume import (
    abandon_after,
    fresh_folder,
    latest_whole,
    newest_run,
    update_meta,
)
from trinity_core.exchange.store.run_store import identify, open_run_store
from trinity_core.exchange.sync.versions import run_versions
from trinity_core.exchange.tracking.metrics_file import rewind
from trinity_core.exchange.tracking.pauses import decided_settings, read_pauses, undo_pauses
from trinity_core.exchange.tracking.run_record import record_kill
from trinity_core.hosting.cluster import placement_of
from trinity_core.hosting.faults import withdraw
from trinity_core.hosting.gpus import smallest_memory, survey
from trinity_core.hosting.placement import Placement, components_of, flow_of, runners, sync_method, unfilled_engine
from trinity_core.results.lineage import newest_checkpoint, weights_of
from trinity_core.run.configuration import start_from, with_settings
from trinity_core.run.made_from import check_same_store, check_shared_settings, made_from
from trinity_core.run.preflight.checks import require_ready
from trinity_core.run.preflight.memory import zero_stage_that_fits

log = logging.getLogger(__name__)

OTHER_MODEL = (
    "The checkpoints of this run began from the model %s; training continues from those weights, not from model."
    "model_path %s. To start from that model, give the run another `name`."
)

BEYOND = (
    "The run in %s has a checkpoint of step %s, and buffer.total_steps is %s: nothing is trained, its result is that "
    "checkpoint. For a shorter run, give it another `name`."
)

PARTED = (
    "continue_from_checkpoint: false gives each run a folder of its own, so %s of %s, which is started alone, would "
    "not meet the other parts: leave the key out, and give all parts another `name` for a new run. (Parts of one "
    "rft_async flow share a folder.)"
)
OTHER_STORE = (
    "The run in %s has a checkpoint of step %s, but the store at %s has no batch of that step: it is a different "
    "store, or was emptied. Restore the run's database, or correct buffer.trainer_input.experience_buffer.path. To "
    "train these weights further with a new store, give the run another `name` and set model.model_path to "
    ".../global_step_N/actor/huggingface."
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One run, ready to start."""

    config: Config
    placement: Placement
    stage: str
    """`rft`, `sft`, `evaluate` …, or the stage's name in a pipeline."""
    parent_dir: Path | None = None
    resumed_step: int = 0
    """The checkpoint that the run resumes from; 0 for a new run."""
    warnings: tuple[str, ...] = ()
    """Warnings before the stage starts, such as settings without effect."""
    made_from: Mapping[str, Any] = field(default_factory=dict)
    """`made_from` of the configuration as loaded; in `config`, sync method and data are those actually used."""


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request to run or evaluate a stage of a loaded and checked configuration."""

    config: Config
    """Configuration of the whole pipeline, if it has stages."""
    kind: str = ""
    """`rft`, `sft` or `evaluate`; "": what runs the stage (`flow_of`)."""
    stage: str = ""
    model_path: str = ""
    """The previous stage's model, if any."""
    which: str = ""
    """The weights to evaluate: base, latest, missing, all, or a step; "": as configured in mode `bench`."""
    run: str = ""
    """The run's name if it is not the configuration's, because the run has a fresh folder."""
    is_ready: bool = False
    """True if preflight has just passed (`load_ready`). Only valid for the first attempt."""
    settings: Sequence[str] = ()
    """Settings of a decision at a pause, which is not recorded yet, as `key=value`."""
    file: str = ""
    """File that the configuration was loaded from, if that is not the parent flow's `config`."""

    @property
    def is_base(self) -> bool:
        """True for the model before all stages, whose scores belong to the pipeline."""
        return self.kind == "evaluate" and self.which == "base"

    @property
    def ending(self) -> str:
        """What tells it apart from the run of the same name, as in `project/name, base score`."""
        return ", base score" if self.is_base else ""

    @property
    def title(self) -> str:
        """`project/name` as configured, or of the given `run`, with the ending; a run in a fresh folder gets its name
        later."""
        of_stage = self.stage and not self.is_base
        config = pick_stage(self.config, self.stage)[0] if of_stage else self.config
        return f"{config.project}/{self.run or config.name}{self.ending}"


def choose_stage(request: StageRequest, begun_by: str = "", is_ready: bool = False) -> Stage:
    """Pick a stage of a checked configuration, check what it names, and assign the machine. Raises TrinityError.

    `begun_by` identifies the attempts at one run, which share a fresh folder. With `is_ready`, what the configuration
    names is not checked again, unless the model is another one. If the stage reads a task pipeline's output that does
    not exist yet, the pipeline runs here.
    """
    config, parent_dir = pick_stage(request.config, request.stage)
    kind = request.kind or flow_of(config)
    evaluates = kind in ("evaluate", "gate")
    if request.is_base and parent_dir:
        config, parent_dir = config.with_values({"name": request.config.name}), None
    if request.run:
        config = config.with_values({"name": request.run})
    before_training = config.model.model_path
    if request.model_path:
        config = start_from(config, request.model_path)
    if not evaluates or (parent_dir and request.model_path):
        config = in_fresh_folder(config, begun_by, is_alone=not request.file)
    elif not request.run:
        config = in_newest_folder(config, parent_dir)
    written = config
    config = _with_decided(config, request.settings)
    if kind == "gate":
        config = for_gate(config, request.model_path, before_training)
    elif evaluates:
        config = for_evaluation(config, request.is_base)
    if parent_dir and (not evaluates or request.model_path) and not is_held(parent_dir, PIPELINE):
        private_folder(parent_dir)
        update_meta(JobLayout(parent_dir).stages, **{request.stage: config.name})
    if request.model_path or not is_ready:
        require_ready(config)
    placement, origin = placement_of(config), {} if kind == "evaluate" else made_from(written)
    takes_over = request.is_base and bool(request.config.stages)  # the first stage reuses the engines
    if takes_over and not placement.on_gpu and (training := placement_of(written)).engines:
        placement = replace(placement, engine_threads=training.engine_threads)
    method, notice = sync_method(config, placement)
    # A run's own evaluation gives no notices: settings that it does not use are meant for training.
    idle = notices(config.with_values({"cluster.colocate": placement.colocated})) if config.mode == written.mode else ()
    notice_of_method = (
        notice if config.written("synchronizer.sync_method") else ""
    )  # a replaced default is not worth a notice
    memory = smallest_memory(survey()) if placement.on_gpu else 0
    unfilled = unfilled_engine(config, placement, memory)
    warnings = (*idle, *filter(None, (notice_of_method, unfilled)), *map(str, config.remarks))
    # The style that validation assumed applies, whichever method replaces it on this machine.
    style = config.synchronizer.style
    config = config.with_values(
        {
            "synchronizer.sync_method": method,
            "synchronizer.sync_style": style,
            "cluster.colocate": placement.colocated,
            "explorer.runner_per_model": runners(config, placement, memory),
            "trainer.zero_stage": zero_stage_that_fits(config, placement, memory),
        }
    )
    if uses_pipeline(config):
        config = _with_curated_tasks(config)
    name = request.stage or request.kind or flow_of(config)
    return Stage(config, placement, name, parent_dir, warnings=warnings, made_from=origin)


def _with_decided(config: Config, settings: Sequence[str]) -> Config:
    """Return the configuration with what people have decided at its pauses so far, and with these settings."""
    changed = any(pause.decided.settings for pause in read_pauses(config.job_dir))
    step = latest_whole(config.job_dir) or 0 if changed else 0
    return with_settings(config, [*decided_settings(config.job_dir, step), *settings])


def _with_curated_tasks(config: Config) -> Config:
    from trinity_core.pipelines.tasks import with_curated_tasks
    from trinity_core.run.asked_models import RunModels

    with RunModels(config) as models:
        return with_curated_tasks(config, models)


def for_evaluation(config: Config, base: bool = False) -> Config:
    """Return the configuration in mode `bench`; with `base`, for the model even if an external one is configured.

    The scores of an external model form their own run, `<name>_<model_name>`. Raises TrinityError if its key is not set
    and Ray is started here; otherwise the explorer checks.
    """
    external = None if base else config.explorer.external_model
    config = config.with_values({"mode": "bench", "explorer.external_model": external})
    if config.model.lora is not None and (step := latest_whole(config.job_dir)):
        # Adapters are loaded onto the model that their run began with: in a pipeline, the previous stage's.
        began = other_beginning(config.job_dir, step, config.model.model_path)
        config = config if began is None else start_from(config, _moved_with(config, began))
    if external is None:
        return config
    if not config.cluster.ray_address:
        key_of_endpoint(config)
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", external.model_name).strip("-.")
    return config.with_values({"name": f"{config.name}_{model}"})


def for_gate(config: Config, candidate: str, before_training: str) -> Config:
    """Return the configuration in mode `bench` whose model is the candidate, by default the run's latest checkpoint.

    `gate.champion` becomes the model `before_training` if it is not set: it is to be beaten before the first promotion.
    Raises DataError if there is no candidate.
    """
    before = config.gate.champion or before_training
    values = {"mode": "bench", "explorer.external_model": None, "gate.champion": before, "model.lora_configs": ()}
    return start_from(config.with_values(values), str(weights_of(candidate or newest_checkpoint(config.job_dir))))


def _moved_with(config: Config, began: Beginning) -> str:
    """Return the model that a run began with; if it is another stage's checkpoint, also after both were moved."""
    here = config.job_dir.parent.joinpath(*Path(began.model).parts[-4:])  # <name>/global_step_<n>/actor/huggingface
    is_moved = here.is_dir() and not Path(began.model).exists() and not began.differs(Beginning.of(str(here)))
    return str(here) if is_moved else began.model


def resume(stage: Stage) -> Stage:
    """Lock the run and find the checkpoint that it resumes from.

    Raises TrinityError if the run is in progress, or if it began with another model that it needs: as its reference,
    or, before its first checkpoint, because that model sampled the rows in its store.
    """
    config = stage.config
    if config.mode == "bench":
        return stage
    components = components_of(config, stage.placement)
    with on_failure(lambda: unlock_run(stage)):
        step = resume_step(config, components)
        with on_failure(lambda: withdraw(config, sys.exception(), components)):
            return _resumed(stage, step, components)


def unlock_run(stage: Stage) -> None:
    """Release the locks of a run that ends, or that fails before it has begun."""
    for name in lock_names(stage.config, components_of(stage.config, stage.placement)):
        release(stage.config.job_dir, name)


def _resumed(stage: Stage, step: int, components: set[str]) -> Stage:
    """Return the stage that resumes from `step`. Raises TrinityError as `resume` does."""
    config = stage.config
    if not step and config.model.model_path:
        lora, has_rows = config.model.lora, not config.is_supervised and _has_rows(config)
        adapter, forget = lora.path if lora is not None else None, partial(_forget_weights, config, components)
        begin_from(config.job_dir, config.model.model_path, has_rows, adapter, forget)
    steps = config.buffer.total_steps
    if steps and step > steps:
        stage = replace(stage, warnings=(*stage.warnings, BEYOND % (config.job_dir, step, steps)))
    began = other_beginning(config.job_dir, step, config.model.model_path) if step else None
    if began is None:
        return replace(stage, resumed_step=step)
    if text := _refused(config, components):
        refuse_other_model(text, began, config.model.model_path, config.job_dir)
    warning = OTHER_MODEL % (began.model, config.model.model_path)
    return replace(stage, resumed_step=step, warnings=(*stage.warnings, warning))


def _refused(config: Config, components: set[str]) -> str:
    """Return why a run cannot resume with another model than it began with, or ""."""
    if config.mode in ("both", "train") and config.model.lora is not None:
        return OTHER_BASE
    if config.mode in ("both", "train") and Objective(config.algorithm).needs_reference:
        return OTHER_REFERENCE
    pushes = SYNC_METHODS[config.synchronizer.sync_method].vllm_backend and not config.is_supervised
    return OTHER_START if pushes and "explore" in components else ""


def _forget_weights(config: Config, components: set[str]) -> None:
    """Remove weights that were published for another model, or for a run whose folder was deleted."""
    if not config.is_supervised and ("train" in components or not is_held(config.job_dir, RUN_TRAINS)):
        run_versions(config).rewind(-1)


def _has_rows(config: Config) -> bool:
    with open_run_store(config) as store:
        return any(store.explorer_steps().values())


def stage_names(config: Config) -> Sequence[str]:
    """Return the names of a configuration's stages in order; one empty name without stages."""
    return [stage.stage_name for stage in config.stages] or [""]


def pick_stage(config: Config, stage: str) -> tuple[Config, Path | None]:
    """Return the stage of that name and the pipeline's folder; without stages, the configuration itself."""
    if not config.stages:
        return config, None
    names = stage_names(config)
    if stage not in names:
        fault = f"{stage!r} is none of them" if stage else "name one as stage (--stage)"
        raise TrinityError(
            f"The configuration has the stages {', '.join(names)}; {fault}. The flow `pipeline` runs all of them.",
            key="stage",
        )
    return stages(config)[names.index(stage)], config.job_dir


def job_dir_of(config: Config, stage: str = "") -> Path:
    """Return the folder of a configuration's run; with stages, that of `stage`, or of the last one that trains."""
    if stage:
        return in_newest_folder(*pick_stage(config, stage)).job_dir
    every = stages(config)
    trained = [stage for stage in every if stage.mode in ("both", "train")]
    return in_newest_folder((trained or every)[-1], config.job_dir if config.stages else None).job_dir


def in_fresh_folder(config: Config, begun_by: str, is_alone: bool = False) -> Config:
    """Give a run (or pipeline) with `continue_from_checkpoint: false` whose folder is taken its own folder,
    `<name>_<time>`.

    A pipeline's stages resume next to its folder. A retry, which has the same `begun_by`, resumes in the folder of the
    first attempt. Raises TrinityError for a part that starts alone.
    """
    if config.continue_from_checkpoint:
        return config
    if config.is_part and is_alone:
        raise TrinityError(PARTED % (config.explorer.name if config.explores else "the trainer", config.name))
    suffixes = [stage.name.removeprefix(config.name) for stage in config.stage_runs]
    name = fresh_folder(config.job_dir.parent, config.name, begun_by, suffixes)
    return config.resuming(name) if config.stages else config.with_values({"name": name})


def in_newest_folder(config: Config, pipeline_dir: Path | None = None) -> Config:
    """Return the run to evaluate or convert: with `continue_from_checkpoint: false` the newest one of that name, or of
    that stage of the pipeline."""
    if config.continue_from_checkpoint:
        return config
    pipeline = pipeline_dir.name if pipeline_dir else config.name
    name = newest_run(config.job_dir.parent, pipeline, config.name.removeprefix(pipeline))
    newest = config.resuming(name) if config.stages else config.with_values({"name": name})
    log.info("The newest run of %s is in %s", config.name, newest.job_dir)
    return newest


def lock_names(config: Config, components: set[str]) -> list[str]:
    """Return the locks that a run of these components holds. Each explorer of a run has its own lock."""
    names = {"train": RUN_TRAINS, "explore": f"explorer_{config.explorer.name}"}
    return [names[component] for component in sorted(components)]


def lock_run(config: Config, components: set[str]) -> None:
    """Lock the run against a second start, which would undo its steps.

    Waits for a trainer that has outlived its flow, and raises TransientFault if it does not end. Raises TrinityError if
    the run is in progress, or if an active explorer or trainer of it has incompatible settings.
    """
    names = lock_names(config, components)
    for name in names:
        hold(config.job_dir, name)
    check_shared_settings(config, names)
    if "train" in components:
        hold(config.job_dir, TRAINER_PROCESS, LINGER_SECONDS)
        release(config.job_dir, TRAINER_PROCESS)


def resume_step(config: Config, components: set[str]) -> int:
    """Lock the run and return the step of its latest intact checkpoint, or 0; rewind what came after it.

    The trainer also rewinds the store when it starts. Rewinding here, before the explorer starts, keeps the explorer
    from beginning a step that would then be undone. An explorer or trainer that runs alone rewinds nothing here. An
    explorer announces itself here, so that a trainer that is ready before its engines waits for it.
    """
    begun = config.job_dir.exists()
    lock_run(config, components)
    if "train" in components:
        record_kill(config.job_dir)
    identify(config)
    if config.is_part:
        with open_run_store(config) as store:
            check_same_store(config, lock_names(config, components), store.identity)
    step = latest_whole(config.job_dir) or 0
    if not begun or config.is_supervised or not (step or "explore" in components):
        return step
    with open_run_store(config) as store:
        if not store.reaches(step):
            raise DataError(OTHER_STORE % (config.job_dir, step, without_password(store_url(config))))
        if "explore" not in components:
            return step
        if "train" in components:
            abandon_after(config.job_dir, step)
            undo_pauses(config.job_dir, step)
            run_versions(config).rewind(step)
            store.rewind(step)
            rewind(config.job_dir, step, store.explorer_steps)
            store.expect_trainer()
        store.expect(config.explorer.name)
    return step
