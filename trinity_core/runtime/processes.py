"""Knowing and ending processes that were started here. A process that ends on its own meanwhile is no error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import psutil


def still_runs(pid: int, started: float) -> bool:
    """True if the process with this id and start time (Unix seconds) runs. A later one with the id does not count."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def families(names: Sequence[str]) -> list[psutil.Process]:
    """Our children with one of these names, each with all its descendants."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() in names:
                found += family(child)
    return found


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all its descendants. Raises psutil.NoSuchProcess if it has ended."""
    return [process, *process.children(recursive=True)]


def stop(process: psutil.Process, grace: float) -> list[str]:
    """Send SIGTERM to a process, kill what is left of its family after `grace` seconds; returns what was killed."""
    members = family(process)
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    return end(members, grace)


def end(processes: Sequence[psutil.Process], grace: float) -> list[str]:
    """Wait `grace` seconds for processes to end on their own and kill the others; returns what was killed."""
    killed = []
    for process in psutil.wait_procs(processes, timeout=grace)[1]:
        with suppress(psutil.NoSuchProcess):
            name = f"{process.name()} ({process.pid})"
            process.kill()
            killed.append(name)
    return killed
