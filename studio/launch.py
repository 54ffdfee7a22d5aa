"""Starting a flow: as a deployment's run, or as a `trinity` command on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studio.settings import StudioSettings
from tasks.retries import api_faults
from trinity_core.base.children import Child, start_detached
from trinity_core.base.errors import TrinityError
from trinity_core.base.waits import poll
from trinity_core.exchange.tracking.run_record import RunRecord, read_record

TRINITY = [sys.executable, "-m", "flows.cli"]
FAULTS: tuple[type[Exception], ...] = (*api_faults(), OSError, TrinityError)
"""What the start of a run, or an action on it, may raise."""
WAITING = """
import json, select, sys
import transformers.tokenization_utils_tokenizers, trinity_core.run.preflight.checks
from flows.cli import main
line = sys.stdin.readline() if select.select([sys.stdin], [], [], 600)[0] else ""
sys.argv[1:] = json.loads(line) if line else sys.exit(1)
main()
"""
"""A `trinity` command that gets its arguments by stdin once it has imported what checks need."""
waiting: dict[StudioSettings, Child] = {}
starting: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
"""Job dir → process that Studio started last for it, and when."""
BEGIN_SECONDS = 60.0
"""Time for a command to begin its run or report why it does not; a running command continues after that."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The parameters of a flow. Empty values are left to the flow."""

    config: str
    overrides: tuple[str, ...] = ()
    stage: str = ""
    run: str = ""
    """Name of a run in a fresh folder, which is resumed instead of the newest one."""

    @property
    def parameters(self) -> dict[str, Any]:
        filled = {name: value for name, value in (("stage", self.stage), ("run", self.run)) if value}
        return {"config": self.config, "overrides": list(self.overrides), **filled}

    @property
    def command(self) -> list[str]:
        same = [f"name={self.run}", "continue_from_checkpoint=true"] if self.run and not self.stage else []
        return ["run", "--config", self.config, *self.overrides, *same]


def start_run(launch: Launch, run: str, job_dir: Path, settings: StudioSettings) -> bool:
    """Start a run in a session of its own, which outlives Studio, and wait until it has begun or ended; False if that
    takes longer. Raises OSError, and TrinityError with its last line if it failed."""
    folder = settings.logs_of(run)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{len([*folder.iterdir()]):04d}.log"
    began, has_begun = time.time(), False
    process = start_detached([*TRINITY, *launch.command], log, _environment(settings), settings.root)
    starting[job_dir] = process, began
    for _ in poll(BEGIN_SECONDS, 0.2):
        record = read_record(job_dir)
        if has_begun := process.poll() is not None or (record is not None and record.began >= began):
            break
    if process.poll():
        lines = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        raise TrinityError(f"{last or f'It ended with {process.returncode}'} (all of it: {settings.shown(log)})")
    return has_begun


def is_starting(job_dir: Path, record: RunRecord | None) -> bool:
    """True while a process that Studio started for a run has recorded nothing in the run's folder."""
    process, began = starting.get(job_dir, (None, 0.0))
    return process is not None and process.poll() is None and (record is None or record.began < began)


def warm_up(settings: StudioSettings) -> None:
    """Start the process of the next `trinity`, whose imports take seconds, unless one waits."""
    if settings not in waiting or not waiting[settings].alive:
        waiting[settings] = _child([sys.executable, "-c", WAITING], settings)


def trinity(arguments: Sequence[str], settings: StudioSettings, seconds: float) -> str:
    """Return what a `trinity` command prints. Raises TrinityError if it prints nothing and fails, and after `seconds`,
    when it is killed with all its descendants."""
    child = waiting.pop(settings, None)
    if child is None or not child.alive:
        child = _child([*TRINITY, *arguments], settings)
    try:
        out, err = child.process.communicate(json.dumps(arguments).encode() + b"\n", timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise TrinityError(f"`trinity {arguments[0]}` has not ended within {seconds:g} s and was killed") from late
    finally:
        if child.alive:
            child.kill()
    if child.process.returncode and not out.strip():
        raise TrinityError(err.decode().strip() or f"`trinity {arguments[0]}` ended with {child.process.returncode}")
    return str(out.decode())


def _child(command: Sequence[str], settings: StudioSettings) -> Child:
    environment, pipe = _environment(settings), subprocess.PIPE
    return Child(command, environment=environment, folder=settings.root, stdin=pipe, stdout=pipe, stderr=pipe)


def _environment(settings: StudioSettings) -> dict[str, str]:
    """Return our environment with Prefect's API, so that Prefect shows the run."""
    return {**os.environ, **({"PREFECT_API_URL": settings.api_url} if settings.api_url else {})}
