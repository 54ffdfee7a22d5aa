"""The room that a machine has for a run, and what a stage lacks there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trinity_core.base.processes import memory_limit
from trinity_core.config.findings import Finding
from trinity_core.config.training import GPU_CONTEXT
from trinity_core.hosting.gpus import smallest_memory, survey
from trinity_core.run.preflight.disk import free_disk
from trinity_core.run.preflight.needs import TRAINER, Need, ProcessEstimate, parts, size, total
from trinity_core.run.preflight.stage_plan import StagePlan

OTHERS_BASE = Need("other processes", 1 << 30, "the flow, Ray and the explorer, by benchmarks/plan.py")
WRITER_BYTES = 256 << 20
"""Each trainer worker's process that writes checkpoints, without the copies, which belong to the worker."""
KEY = "cluster.allow_oversized"


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of one node, in bytes."""

    memory: int
    """Total host memory, including what is in use."""
    gpu_memory: int
    """Memory of the smallest GPU; 0 without GPUs."""
    disk: int
    """Free disk space for the run, plus what the run has already written."""


def room_for(job_dir: Path) -> Room:
    """Return this machine's room for the run in `job_dir`, which need not exist."""
    return Room(memory_limit(), smallest_memory(survey()), free_disk(job_dir))


def shortages(stage: StagePlan, room: Room) -> Iterator[Finding]:
    """Yield each resource of which a stage needs more than a node has: an error if its `held` needs alone do not fit,
    or the disk; else a warning."""
    held = [_held(process) for process in stage.processes]
    is_certain = any(_host_shortages(held, room))
    yield from (_finding(shortage, is_certain) for shortage in _host_shortages(stage.processes, room))
    is_certain = any(_gpu_shortages(held, room, resting=0))
    yield from (_finding(shortage, is_certain) for shortage in _gpu_shortages(stage.processes, room, GPU_CONTEXT))
    if stage.disk and (needed := total(stage.disk)) > room.disk:
        shortage = f"the run writes about {size(needed)} to {stage.job_dir}, and {size(room.disk)} are free there"
        yield _finding(f"{shortage}: {parts(stage.disk)}.", is_certain=True)


def _finding(shortage: str, is_certain: bool) -> Finding:
    anyway = f"Make it smaller (`trinity plan` shows what takes how much), or set {KEY}: true to start it nevertheless."
    perhaps = "This is an estimate of the peak (`trinity plan`): the run starts, and may end for lack of it."
    severity: Literal["error", "warning"] = "error" if is_certain else "warning"
    return Finding(KEY, False, "unavailable", f"{shortage} {anyway if is_certain else perhaps}", severity=severity)


def _held(process: ProcessEstimate) -> ProcessEstimate:
    memory, host = (tuple(need for need in needs if need.held) for needs in (process.memory or (), process.host))
    return replace(process, memory=memory, host=host, once=())


def _host_shortages(processes: Sequence[ProcessEstimate], room: Room) -> Iterator[str]:
    host = [need for process in processes for need in _on_host(process)]
    if host and (needed := total(host) + OTHERS_BASE.bytes) > room.memory:
        yield f"the run needs about {size(needed)} of memory, and there are {size(room.memory)}: {parts(host)}."


def _gpu_shortages(processes: Sequence[ProcessEstimate], room: Room, resting: int) -> Iterator[str]:
    """Yield shortages of GPU memory; a process that leaves a GPU in turn keeps `resting` bytes of it."""
    on_gpu = [process for process in processes if room.gpu_memory and process.gpus]
    for process in on_gpu:
        needed, needs = total(process.memory or ()), parts(process.memory or ())
        if process.share and needed > process.share:
            yield (
                f"each {process.kind} needs at least {size(needed)} of a GPU's memory, and its share is "
                f"{size(process.share)} (gpu_memory_utilization, kv_cache_gib): {needs}."
            )
        sharing = [other for other in on_gpu if process.gpus < 1 and other.gpus < 1 and other is not process]
        others = sum(resting if other.in_turn else other.bytes for other in sharing)
        if needed and needed + others > room.gpu_memory:
            beside = f", and {size(others)} beside it" * bool(others)
            yield (
                f"each {process.kind} needs about {size(needed)} of a GPU's memory{beside}, and a GPU has "
                f"{size(room.gpu_memory)}: {needs}."
            )


def _on_host(process: ProcessEstimate) -> list[Need]:
    """Return the host memory of all processes of this kind, without what they use only if it is free."""
    needs = [need for need in (process.host if process.gpus else process.memory or ()) if not need.spared]
    each = [replace(need, what=f"{process.kind}: {need.what}", bytes=process.number * need.bytes) for need in needs]
    writers = process.number * WRITER_BYTES * (process.kind == TRAINER)
    return [*each, *process.once, *([Need("processes that write checkpoints", writers, "")] if writers else [])]
