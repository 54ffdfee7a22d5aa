"""Memory and disk that a stage needs and a machine lacks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trinity_core.config.findings import Finding
from trinity_core.run.preflight.model_shape import Need, least, size, total
from trinity_core.run.preflight.resource_estimate import TRAINER, ProcessEstimate, Room
from trinity_core.run.preflight.stage_plan import StagePlan

KEY = "cluster.allow_oversized"
OTHER_PROCESSES = Need("other processes", 1 << 30, "the flow, Ray and the explorer")
"""Memory of every run besides its engines and workers (`benchmarks/plan.py`)."""
WRITER_BYTES = 256 << 20
"""Memory of each trainer worker's checkpoint writing process, without the copies, which belong to the worker."""
ANYWAY = f"Make it smaller (`trinity plan` shows what takes how much), or set {KEY}: true to start it nevertheless."
PERHAPS = "This is an estimate of the peak (`trinity plan`): the run starts, and may end for lack of it."


def shortages(stage: StagePlan, room: Room) -> Iterator[Finding]:
    """Yield each resource of which a stage needs more than the machine has: an error if what is `held` throughout does
    not fit, or the disk; else a warning."""
    held = replace(stage, processes=tuple(map(_held, stage.processes)))
    for shortages_of in (_memory_shortages, _gpu_shortages, _disk_shortages):
        is_certain = any(shortages_of(held, room))
        for shortage in shortages_of(stage, room):
            yield Finding(
                KEY, False, "unavailable", f"{shortage} {ANYWAY if is_certain else PERHAPS}",
                severity="error" if is_certain else "warning",
            )  # fmt: skip


def _held(process: ProcessEstimate) -> ProcessEstimate:
    """Return a process with only the needs that are `held`."""

    def held(needs: tuple[Need, ...]) -> tuple[Need, ...]:
        return tuple(need for need in needs if need.held)

    return replace(
        process,
        memory=None if process.memory is None else held(process.memory),
        least=held(process.least),
        host=held(process.host),
        reading=0,
        shared_memory=0,
        resting=tuple(replace(need, bytes=0) for need in process.resting),
    )


def _disk_shortages(stage: StagePlan, room: Room) -> Iterator[str]:
    if stage.disk and total(stage.disk) > room.disk:
        yield (
            f"the run writes about {size(total(stage.disk))} to {stage.job_dir}, and {size(room.disk)} are free "
            f"there: {_parts(stage.disk)}."
        )


def _memory_shortages(stage: StagePlan, room: Room) -> Iterator[str]:
    """Yield shortages of host memory. For processes on a GPU their host memory counts."""
    needs = [(process, process.host if process.gpus else process.memory or ()) for process in stage.processes]
    of_gpus = sum(group.shared_memory for group in stage.processes if group.gpus)  # on the CPU it is part of the needs
    needed = sum(max(process.number * least(memory), process.reading) for process, memory in needs)
    writers = sum(process.number for process in stage.processes if process.kind == TRAINER) * WRITER_BYTES
    needed += of_gpus + writers + OTHER_PROCESSES.bytes
    if any(memory for _, memory in needs) and needed > room.memory:
        parts = [f"{group.number} × {group.kind}, {size(least(memory))} ({_parts(memory)})" for group, memory in needs]
        parts += [f"{size(of_gpus)} published weights"] * bool(of_gpus)
        parts += [f"{size(writers)} processes that write checkpoints"] * bool(writers)
        listed = "; ".join([*parts, f"{size(OTHER_PROCESSES.bytes)} {OTHER_PROCESSES.what}"])
        yield f"the run needs about {size(needed)} of memory, and there are {size(room.memory)}: {listed}."


def shared_memory_shortage(stage: StagePlan, room: Room) -> str:
    """Say where published weights go if they do not fit into shared memory; "" if they fit."""
    shared = sum(process.shared_memory for process in stage.processes)
    if shared <= room.shared_memory:
        return ""
    return (
        f"The trainer publishes weights in /dev/shm, {size(shared)} in all, which has {size(room.shared_memory)}: what "
        f"finds no room goes through {tempfile.gettempdir()}, which may be slower. Enlarge /dev/shm (docker run "
        "--shm-size), or choose another synchronizer.sync_method."
    )


def _gpu_shortages(stage: StagePlan, room: Room) -> Iterator[str]:
    """Yield shortages of GPU memory: per process, for processes that share a GPU, and within an engine's share."""
    gpu_memory = room.gpu_memory
    on_gpu = [process for process in stage.processes if gpu_memory and process.gpus and process.memory]
    for process in on_gpu:
        assert process.memory is not None
        if process.least and total(process.least) > total(process.memory):
            yield (
                f"each {process.kind} needs at least {size(total(process.least))} of a GPU's memory, and its share is "
                f"{size(total(process.memory))} (gpu_memory_utilization, kv_cache_gib): {_parts(process.least)}."
            )
        if total(process.memory) > gpu_memory:
            yield (
                f"each {process.kind} needs about {size(total(process.memory))} of a GPU's memory, and a GPU has "
                f"{size(gpu_memory)}: {_parts(process.memory)}."
            )
    sharing = [group for group in on_gpu if group.gpus < 1]
    if all(group.resting for group in sharing):
        yield from _colocation_shortages(sharing, gpu_memory)
        return
    needed = sum(group.bytes or 0 for group in sharing)
    if len(sharing) > 1 and needed > gpu_memory:
        parts = "; ".join(f"{group.kind}, {size(group.bytes or 0)} ({_parts(group.memory or ())})" for group in sharing)
        yield (
            f"the processes on one GPU need about {size(needed)} of its memory together, and it has "
            f"{size(gpu_memory)}: {parts}."
        )


def _colocation_shortages(sharing: Sequence[ProcessEstimate], gpu_memory: int) -> Iterator[str]:
    """Yield shortages on a GPU that processes use in turn: each has what the resting ones leave."""
    for process in sharing:
        resting = sum(total(other.resting) for other in sharing if other is not process)
        needed = (process.bytes or 0) + resting
        if (process.bytes or 0) <= gpu_memory < needed:
            yield (
                f"the {process.kind} needs about {size(needed)} of the GPU's memory in its turn (cluster.colocate), "
                f"and a GPU has {size(gpu_memory)}: {_parts(process.memory or ())}, {size(resting)} the other side."
            )


def _parts(needs: tuple[Need, ...]) -> str:
    largest = sorted((need for need in needs if not need.spared), key=lambda need: -need.bytes)
    return ", ".join(f"{size(need.bytes)} {need.what}" for need in largest)
