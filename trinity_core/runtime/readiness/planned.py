"""What `trinity plan` says: what each stage of a configuration will do, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import psutil

from trinity_core.config import Config, public_dict, stages
from trinity_core.errors import TrinityError
from trinity_core.runtime.calibration.pace import Pace
from trinity_core.runtime.gpus import survey
from trinity_core.runtime.outlook.counts import evaluations, saves, syncs
from trinity_core.runtime.outlook.disk import disk_of
from trinity_core.runtime.outlook.memory import WIDTHS, trainer_dtype, with_memory
from trinity_core.runtime.outlook.model_sizes import shape_of, why_unknown
from trinity_core.runtime.outlook.need import Need
from trinity_core.runtime.outlook.processes import ProcessOutlook, processes_of
from trinity_core.runtime.outlook.steps import Steps, steps_of
from trinity_core.runtime.placement import Machine, Placement, place


@dataclass(frozen=True, slots=True)
class StageOutlook:
    """What a stage will do. None stands for what it does not do, or what cannot be known before it runs."""

    name: str
    project: str
    algorithm: str
    mode: str
    job_dir: str
    model: str
    """What `model.model_path` says; a later stage begins with the weights of the one before it."""
    parameters: int | None
    """Of the model, by its files here or in the cache of the hub; None where they do not tell."""
    total_steps: int | None
    """None where they are not known before the run."""
    steps_why: str
    """The epochs and rows that they come from, or why they are not known; empty for configured steps."""
    tasks_a_step: int | None
    rollouts_a_step: int | None
    sampled_tokens_a_step: int | None
    """At most, with one turn a rollout: every response as long as `max_response_tokens`."""
    sampled_tokens: int | None
    """The same of all steps."""
    experiences_a_step: int | None
    eval_interval: int | None
    save_interval: int | None
    sync_interval: int | None
    eval_sets: tuple[str, ...]
    """Task sets for evaluation."""
    evals: int | None
    """Evaluations of all steps on all of them; likewise the next two."""
    saves: int | None
    syncs: int | None
    processes: tuple[ProcessOutlook, ...]
    unplaced: str
    """Why this machine does not have what the processes ask for, such as GPUs; empty if it has."""
    disk: tuple[Need, ...] | None
    """What is in the run's folder at the end."""
    disk_unknown: str
    """Why that cannot be estimated."""
    settings: dict[str, Any]
    """The resolved configuration, without secrets."""
    pace: Pace | None = None
    """Seconds a step, if they have been measured on this machine (`--measure`) and looked up (`paced`)."""
    immeasurable: str = ""
    """Why they cannot be measured; empty if they can."""


def planned(config: Config, machine: Machine | None = None) -> list[StageOutlook]:
    """The stages of a checked configuration, in order; only the headers of weight files are read.

    `machine` is one node of the run: by default this machine. Free memory and that of a GPU are this machine's.
    """
    gpus = survey()
    node = machine or Machine(len(os.sched_getaffinity(0)), len(gpus))
    gpu_memory = min((gpu.memory for gpu in gpus), default=0)
    return [_stage(each, node, gpu_memory) for each in stages(config)]


def _stage(config: Config, machine: Machine, gpu_memory: int) -> StageOutlook:
    explores, trains = config.mode in ("both", "explore"), config.mode in ("both", "train")
    explores = explores and not config.is_supervised
    tasks = config.buffer.batch_size if explores else None
    rollouts = tasks * config.algorithm.repeat_times if tasks else None
    sampled = rollouts * config.model.max_response_tokens if rollouts else None
    known = steps_of(config) if explores or trains else Steps(None)
    steps = known.count
    placement, processes, unplaced = _placed(config, machine, gpu_memory)
    evaluates = config.mode == "bench" or explores
    external = config.explorer.external_model if config.external_model else None
    model = config.model.model_path if external is None else f"{external.model_name} at {external.base_url}"
    shape = None if external else shape_of(config.model.model_path)
    disk, disk_unknown = _disk(config, known, placement) if explores or trains else (None, "")
    return StageOutlook(
        name=config.name,
        project=config.project,
        algorithm="" if config.mode == "bench" else config.algorithm.algorithm_type,
        mode=config.mode,
        job_dir=str(config.job_dir),
        model=model,
        parameters=shape.parameters if shape else None,
        total_steps=steps,
        steps_why=known.why,
        tasks_a_step=tasks,
        rollouts_a_step=rollouts,
        sampled_tokens_a_step=sampled,
        sampled_tokens=sampled * steps if sampled and steps else None,
        experiences_a_step=config.buffer.train_batch_size if trains else None,
        eval_interval=config.explorer.eval_interval if explores else None,
        save_interval=config.trainer.save_interval if trains else None,
        sync_interval=config.synchronizer.sync_interval if explores and trains else None,
        eval_sets=tuple(each.name or "" for each in config.buffer.explorer_input.eval_tasksets) if evaluates else (),
        evals=evaluations(config, steps or 0) if evaluates and (steps or config.mode == "bench") else None,
        saves=saves(config, steps) if steps and trains else None,
        syncs=syncs(config, steps) if steps and trains and not config.is_supervised else None,
        processes=tuple(processes),
        unplaced=unplaced,
        disk=disk,
        disk_unknown=disk_unknown,
        settings=public_dict(config),
    )


def _placed(config: Config, machine: Machine, gpu_memory: int) -> tuple[Placement | None, list[ProcessOutlook], str]:
    """The placement, its processes with their peaks, and why this machine cannot have them.

    Where it lacks GPUs, they are planned for one that has as many as the configuration asks for.
    """
    free = psutil.virtual_memory().available
    try:
        return *_processes(config, machine, free, gpu_memory), ""
    except TrinityError as error:
        asked = config.cluster.gpu_per_node or 0
        if asked <= machine.gpus:
            return None, [], str(error)
        unplaced = str(error)
    try:
        return *_processes(config, replace(machine, gpus=asked), free, gpu_memory), unplaced
    except TrinityError:
        return None, [], unplaced


def _processes(config: Config, machine: Machine, free: int, gpu_memory: int) -> tuple[Placement, list[ProcessOutlook]]:
    placement = place(config, machine)
    return placement, with_memory(processes_of(config, placement), config, placement, free, gpu_memory)


def _disk(config: Config, steps: Steps, placement: Placement | None) -> tuple[tuple[Need, ...] | None, str]:
    """The disk that the stage fills, or why it cannot be estimated."""
    if steps.count is None:
        return None, steps.why
    models = [config.model.model_path, *([config.model.critic_model_path] if config.needs_critic else [])]
    trained = []
    for model in models if config.mode in ("both", "train") else ():
        shape = shape_of(model)
        if shape is None:
            return None, why_unknown(model)
        trained.append(shape)
    width = WIDTHS[trainer_dtype(config, placement is not None and placement.on_gpu)]
    return disk_of(config, steps.count, trained, width), ""
