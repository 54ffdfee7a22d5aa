"""What a machine has for a run: memory of its own and of its GPUs, and disk."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from trinity_core.runtime.gpus import survey

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says what a container may take: cgroups of version 2, of version 1."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one node."""

    memory: int
    """All of it, whoever uses it now."""
    gpu_memory: int
    """Of the smallest GPU; 0 without any."""
    disk: int
    """Free where the run writes, and what the run has written already."""


def room_for(job_dir: Path) -> Room:
    """What this machine has for the run in `job_dir`, which need not exist."""
    there = next(each for each in (job_dir, *job_dir.parents) if each.exists())
    written = sum(file.stat().st_size for file in job_dir.glob("global_step_*/**/*") if file.is_file())
    return Room(memory_of_this_machine(), min((gpu.memory for gpu in survey()), default=0), free_disk(there) + written)


def memory_of_this_machine(limits: tuple[Path, ...] = LIMITS) -> int:
    """Bytes that processes here may have together: the machine's, or the limit of the container."""
    given = [text for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([int(psutil.virtual_memory().total), *map(int, given)])


def free_disk(folder: Path) -> int:
    """Free bytes of the file system of a folder; of one without a size, such as /proc, no limit is known."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize
