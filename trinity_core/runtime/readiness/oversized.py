"""Whether a run takes more memory or disk than this machine has, by what `trinity plan` estimates."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_core.config import Config
from trinity_core.runtime.outlook.need import Need, size, total
from trinity_core.runtime.outlook.processes import ProcessOutlook
from trinity_core.runtime.outlook.room import Room, room_for
from trinity_core.runtime.readiness.obstacle import Obstacle
from trinity_core.runtime.readiness.planned import StageOutlook, planned

KEY = "cluster.allow_oversized"
BESIDE = Need("other processes", 1 << 30, "the flow, Ray, the explorer and its rewards")
"""Of a run on one machine (`benchmarks/plan.py`)."""
ANYWAY = f"Make it smaller (`trinity plan` shows what takes how much), or set {KEY}: true to start it nevertheless."


def oversized(config: Config) -> Iterator[Obstacle]:
    """What a run takes more of than there is; nothing if it may, or if its size cannot be estimated."""
    if config.cluster.allow_oversized:
        return
    (outlook,) = planned(config)
    for shortage in shortages(outlook, room_for(config.job_dir)):
        yield Obstacle(KEY, False, f"{shortage} {ANYWAY}")


def shortages(outlook: StageOutlook, room: Room) -> Iterator[str]:
    """A sentence for each thing that a stage takes more of than one machine has."""
    on_cpu = [each for each in outlook.processes if not each.gpus and each.bytes]
    wanted = sum(each.bytes or 0 for each in on_cpu) + BESIDE.bytes
    if on_cpu and wanted > room.memory:
        parts = "; ".join([*map(_told, on_cpu), f"{size(BESIDE.bytes)} {BESIDE.what}"])
        yield f"the run needs about {size(wanted)} of memory, and there are {size(room.memory)}: {parts}."
    for process in outlook.processes:
        if process.gpus and process.memory and 0 < room.gpu_memory < total(process.memory):
            yield (
                f"each {process.kind} needs about {size(total(process.memory))} of a GPU's memory, and a GPU has "
                f"{size(room.gpu_memory)}: {_parts(process.memory)}."
            )
    if outlook.disk and total(outlook.disk) > room.disk:
        yield (
            f"the run writes about {size(total(outlook.disk))} to {outlook.job_dir}, and {size(room.disk)} are free "
            f"there: {_parts(outlook.disk)}."
        )


def _told(process: ProcessOutlook) -> str:
    assert process.memory is not None
    each = f"{size(total(process.memory))} ({_parts(process.memory)})"
    return f"{process.number} × {process.kind}, {each}"


def _parts(needs: tuple[Need, ...]) -> str:
    return ", ".join(f"{size(need.bytes)} {need.what}" for need in sorted(needs, key=lambda need: -need.bytes))
