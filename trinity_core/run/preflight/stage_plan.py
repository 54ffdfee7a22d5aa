"""The output of `trinity plan`: what each stage of a configuration will do, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.base.errors import TrinityError
from trinity_core.base.processes import cores, free_memory, memory_limit
from trinity_core.base.timing import duration
from trinity_core.config import Config, public_dict, stages
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.config.training import DTYPE_BYTES
from trinity_core.hosting.gpus import smallest_memory, survey
from trinity_core.hosting.placement import Machine, Placement, place
from trinity_core.run.preflight.disk import disk_of, free_disk
from trinity_core.run.preflight.memory import processes_of, reward_processes, trainer_dtype
from trinity_core.run.preflight.model_shape import shape_of, why_unknown
from trinity_core.run.preflight.needs import Need, ProcessEstimate, parts, size, total
from trinity_core.run.preflight.pace import Pace, cached_pace, hindrance
from trinity_core.run.preflight.steps import (
    Steps,
    evaluating_stage,
    evaluations,
    saves,
    scores_base,
    steps_of,
    syncs,
)

Row = tuple[str, str]
"""A row in the table of estimates: amount, and what takes it."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Description of a stage. None: not applicable, or not known before it runs."""

    name: str
    project: str
    algorithm: str
    mode: str
    job_dir: str
    model: str
    """The value of `model.model_path`; of a later stage `weights of RUN`, the stage that trained last."""
    parameters: int | None
    """The model's number of parameters, from its local files or the hub's cache; None if unknown."""
    total_steps: int | None
    """None if not known before the run."""
    steps_why: str
    """The epochs and rows behind the number, or why it is unknown; empty for configured steps."""
    tasks_a_step: int | None
    rollouts_a_step: int | None
    sampled_tokens_a_step: int | None
    """Maximum, with one turn per rollout and every response `max_response_tokens` long."""
    sampled_tokens: int | None
    experiences_a_step: int | None
    eval_interval: int | None
    save_interval: int | None
    sync_interval: int | None
    eval_sets: tuple[str, ...]
    evals: int | None
    """Number of evaluations on all eval sets during the run; likewise the next two."""
    saves: int | None
    syncs: int | None
    processes: tuple[ProcessEstimate, ...]
    unplaced: str
    """Why this machine lacks what the processes ask for, such as GPUs; empty if it has everything."""
    disk: tuple[Need, ...] | None
    """Contents of the run's folder at the end."""
    disk_unknown: str
    price_per_hour: float | None
    settings: dict[str, Any]
    """The resolved configuration, without secrets."""
    pace: Pace | None = None
    """Seconds per step, if measured on this machine (`--measure`) and looked up (`plans_with_pace`)."""
    scores_base: bool = False
    """True if the eval sets also score the base model, before the pipeline's first stage."""
    immeasurable: str = ""
    """Why the pace cannot be measured; empty if it can."""


def plans_of(config: Config, machine: Machine | None = None, gpu_memory: int | None = None) -> list[StagePlan]:
    """Return the plans of a checked configuration's stages, in order; of weight files only the headers are read.

    `machine` is one node of the run, `gpu_memory` the bytes of one of its GPUs; both default to this machine's. Free
    memory is this machine's.
    """
    gpus = survey()
    node = machine or Machine(cores(), len(gpus))
    if gpu_memory is None:
        gpu_memory = smallest_memory(gpus)
    parts = stages(config)
    plans = [_stage(stage, node, gpu_memory) for stage in parts]
    trained = ""
    for index, stage in enumerate(parts):
        if trained and stage.external_model is None:
            plans[index] = replace(plans[index], model=f"weights of {trained}")
        trained = stage.name if stage.mode in ("both", "train") else trained
    last = evaluating_stage(parts) if config.stages else None
    if last is not None and scores_base(parts[last]):
        plans[last] = replace(plans[last], scores_base=True)
    return plans


def plans_with_pace(config: Config) -> list[StagePlan]:
    """Return `plans_of` on this machine, with each stage's measured pace, or why it cannot be measured."""
    return [
        replace(plan, pace=cached_pace(stage), immeasurable=hindrance(stage))
        for plan, stage in zip(plans_of(config), stages(config), strict=True)
    ]


def _stage(config: Config, machine: Machine, gpu_memory: int) -> StagePlan:
    explores, trains = config.mode in ("both", "explore"), config.mode in ("both", "train")
    explores = explores and not config.is_supervised
    tasks = config.buffer.batch_size if explores else None
    rollouts = tasks * config.algorithm.repeat_times if tasks else None
    sampled = rollouts * config.model.max_response_tokens if rollouts else None
    run_steps = steps_of(config) if explores or trains else Steps(None)
    steps = run_steps.count
    placement, processes, unplaced = _placed(config, machine, gpu_memory)
    evaluates = config.mode == "bench" or explores or config.evaluates_beside
    external = config.explorer.external_model if config.external_model else None
    model = config.model.model_path if external is None else f"{external.model_name} at {external.base_url}"
    shape = None if external else shape_of(config.model.model_path)
    disk, disk_unknown = _disk(config, run_steps, placement) if explores or trains else (None, "")
    return StagePlan(
        name=config.name,
        project=config.project,
        algorithm="" if config.mode == "bench" else config.algorithm.algorithm_type,
        mode=config.mode,
        job_dir=str(config.job_dir),
        model=model,
        parameters=shape.parameters if shape else None,
        total_steps=steps,
        steps_why=run_steps.why,
        tasks_a_step=tasks,
        rollouts_a_step=rollouts,
        sampled_tokens_a_step=sampled,
        sampled_tokens=sampled * steps if sampled and steps else None,
        experiences_a_step=config.buffer.train_batch_size if trains else None,
        eval_interval=config.explorer.eval_interval if explores or config.evaluates_beside else None,
        save_interval=config.trainer.save_interval if trains else None,
        sync_interval=SyncSchedule.of(config).interval if explores and trains else None,
        eval_sets=tuple(taskset.name for taskset in config.buffer.explorer_input.eval_tasksets) if evaluates else (),
        evals=evaluations(config, steps or 0) if evaluates and (steps or config.mode == "bench") else None,
        saves=saves(config, steps) if steps and trains else None,
        syncs=syncs(config, steps) if steps and trains and not config.is_supervised else None,
        processes=tuple(processes),
        unplaced=unplaced,
        disk=disk,
        disk_unknown=disk_unknown,
        price_per_hour=config.cluster.price_per_hour,
        settings=public_dict(config),
    )


def _placed(config: Config, machine: Machine, gpu_memory: int) -> tuple[Placement | None, list[ProcessEstimate], str]:
    """Return the placement, its processes with their peaks, and why this machine cannot have them.

    If GPUs are missing, the plan assumes a machine with as many as the configuration asks for.
    """
    free = free_memory()
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


def _processes(config: Config, machine: Machine, free: int, gpu_memory: int) -> tuple[Placement, list[ProcessEstimate]]:
    placement = place(config, machine)
    processes = [*processes_of(config, placement, free, gpu_memory), *reward_processes(config, machine.cpus)]
    if config.evaluates_beside:
        beside = config.with_values({"mode": "bench", "explorer.rollout_model.engine_num": 1})
        more = processes_of(beside, place(beside, machine), free, gpu_memory)
        more += reward_processes(beside, machine.cpus)
        processes += [replace(process, kind=f"evaluation's {process.kind}") for process in more]
    return placement, processes


def _disk(config: Config, steps: Steps, placement: Placement | None) -> tuple[tuple[Need, ...] | None, str]:
    if steps.count is None:
        return None, steps.why
    models = [config.model.model_path, *([config.model.critic_model_path] if config.needs_critic else [])]
    trained = []
    for model in models if config.mode in ("both", "train") else ():
        shape = shape_of(model)
        if shape is None:
            return None, why_unknown(model)
        trained.append(shape)
    width = DTYPE_BYTES[trainer_dtype(config, placement is not None and placement.on_gpu)]
    return disk_of(config, steps.count, trained, width), ""


def plan_text(plans: list[StagePlan]) -> str:
    return "\n".join([*(line for plan in plans for line in _lines(plan)), *(_whole(plans) if len(plans) > 1 else ())])


def plan_json(plans: list[StagePlan]) -> str:
    """Return the plans as JSON: an object with the list `stages`."""
    return json.dumps({"stages": [asdict(plan) for plan in plans]}, indent=2, default=str)


def _lines(stage: StagePlan) -> Iterator[str]:
    mode = f", mode {stage.mode}" if stage.algorithm else ""
    yield f"{stage.project}/{stage.name}: {stage.algorithm or stage.mode}{mode}, {stage.job_dir}"
    yield from _facts(stage)
    needs = [*map(_process_rows, stage.processes), _memory_rows(stage), *_disk_rows(stage)]
    if any(needs):
        yield _line("takes", "by estimate: peak memory of each process, disk at the end")
        yield from _table([row for rows in needs for row in rows])


def _memory_rows(stage: StagePlan) -> list[Row]:
    """Return the memory of all processes of a stage beside what this machine has; none if one is unknown."""
    needs = [(process, process.host if process.gpus else process.memory) for process in stage.processes]
    if not needs or any(need is None for _, need in needs):
        return []
    asked = sum(process.number * total(need or ()) + total(process.once) for process, need in needs)
    beside = ", besides the GPUs" if any(process.gpus for process in stage.processes) else ""
    here = f"of {size(memory_limit())} here, {size(free_memory())} are free"
    return [(size(asked), f"all processes at once{beside}; {here}")]


def _whole(plans: list[StagePlan]) -> Iterator[str]:
    """Describe what all stages of a pipeline take together, as far as it is known."""
    yield "all stages"
    if all(plan.total_steps is not None for plan in plans):
        tokens = sum(plan.sampled_tokens or 0 for plan in plans)
        sampled = f", at most {tokens:,} sampled tokens (of each turn)" if tokens else ""
        yield _line("steps", f"{sum(plan.total_steps or 0 for plan in plans):,}{sampled}")
    if all(plan.pace is not None and plan.total_steps for plan in plans):
        seconds = sum(plan.pace.whole(plan.total_steps) for plan in plans if plan.pace and plan.total_steps)
        yield _line("time", f"{duration(seconds)}, without evaluations and saves")
    if all(plan.disk is not None for plan in plans):
        yield _line("disk", f"{size(sum(total(plan.disk or ()) for plan in plans))}; {_free_disk(plans[0])}")


def _facts(stage: StagePlan) -> Iterator[str]:
    parameters = "" if stage.parameters is None else f" ({stage.parameters:,} parameters)"
    yield _line("model", f"{stage.model}{parameters}")
    if stage.tasks_a_step or stage.experiences_a_step:
        if stage.total_steps is None:
            yield _line("steps", f"not known before the run: {stage.steps_why}")
        else:
            yield _line("steps", f"{stage.total_steps:,}" + (f": {stage.steps_why}" if stage.steps_why else ""))
    if stage.tasks_a_step:
        sampled = f"at most {stage.sampled_tokens_a_step:,} sampled tokens (of each turn)"
        whole = f"; {stage.sampled_tokens:,} in all" if stage.sampled_tokens else ""
        yield _line("explore", f"{stage.tasks_a_step:,} tasks, {stage.rollouts_a_step:,} rollouts, {sampled}{whole}")
    if stage.experiences_a_step:
        yield _line("train", f"{stage.experiences_a_step:,} experiences each step")
    sets = f"on {', '.join(stage.eval_sets)}" if stage.eval_sets else ""
    every = (
        ("eval", stage.eval_interval if stage.eval_sets else None, stage.evals, sets),
        ("save", stage.save_interval, stage.saves, ""),
        ("sync", stage.sync_interval, stage.syncs, ""),
    )
    for name, steps, count, on in every:
        if count != 0 and (steps or count):
            parts = [f"every {_count(steps, 'step')}" if steps else "", f"{count:,} in all" if count else "", on]
            yield _line(name, ", ".join(filter(None, parts)))
    if stage.scores_base:
        yield _line("base", f"the model as it is, before the first stage, is evaluated {sets} too")
    if stage.unplaced:
        yield _line("place", f"not on this machine: {stage.unplaced}")
    yield _line("time", _time(stage))
    if stage.price_per_hour is not None:
        yield _line("price", _price(stage, stage.price_per_hour))


def _time(stage: StagePlan) -> str:
    pace = stage.pace
    if pace is None:
        why = stage.immeasurable or ("this machine lacks what the stage asks for" if stage.unplaced else "")
        return f"not known: {why}" if why else "`trinity plan --measure` runs a few steps to measure it"
    parts = ", ".join(f"{name} {seconds:.2g}" for name, seconds in pace.parts.items())
    whole = f"; {duration(pace.whole(stage.total_steps))} in all" if stage.total_steps else ""
    line = f"{pace.step:.3g} s a step{f' ({parts})' if parts else ''} after {pace.start:.0f} s to start{whole}"
    return f"{line}, without evaluations and saves; measured {pace.measured}"


def _price(stage: StagePlan, per_hour: float) -> str:
    if stage.pace is None or not stage.total_steps:
        return f"{per_hour:g} an hour"
    return f"{per_hour * stage.pace.whole(stage.total_steps) / 3600:.2f} in all, at {per_hour:g} an hour"


def _process_rows(process: ProcessEstimate) -> list[Row]:
    on = f"{process.gpus:g} GPU" if process.gpus else _count(process.threads, "CPU thread")
    on = "one GPU in turn" if process.in_turn else on
    title = f"{process.kind}, {process.number} on {on}{' each' if process.number > 1 else ''}"
    host = [(size(total(process.host)), f"  besides the GPU: {parts(process.host)}")] if process.host else []
    return [*_rows(title, process.memory, process.unknown), *host]


def _disk_rows(stage: StagePlan) -> list[list[Row]]:
    title = "disk" if stage.disk is None else f"disk; {_free_disk(stage)}"
    return [_rows(title, stage.disk, stage.disk_unknown)] if stage.disk or stage.disk_unknown else []


def _free_disk(stage: StagePlan) -> str:
    return f"{size(free_disk(Path(stage.job_dir)))} are free here"


def _rows(title: str, needs: tuple[Need, ...] | None, unknown: str) -> list[Row]:
    if needs is None:
        return [("?", f"{title}: {unknown}")]
    return [(size(total(needs)), title), *((size(need.bytes), f"  {need.what}: {need.why}") for need in needs)]


def _table(rows: list[Row]) -> Iterator[str]:
    """Format rows with right-aligned amounts in a narrow column: Studio shows these lines in half a page."""
    amounts = max(len(amount) for amount, _ in rows)
    yield from (f"    {amount:>{amounts}}  {what}" for amount, what in rows)


def _count(number: int, what: str) -> str:
    return what if number == 1 and what == "step" else f"{number:,} {what}{'s' * (number > 1)}"


def _line(name: str, text: str) -> str:
    return f"  {name:8} {text}"
