"""Runs that Studio has started as processes of this machine. They outlive Studio; a file records each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from studio.access import TOKEN_VARIABLE
from studio.settings import StudioSettings
from trinity_core.children import start_detached
from trinity_core.files import read_json, write_json
from trinity_core.processes import start_mark, still_runs


@dataclass(frozen=True, slots=True)
class Launch:
    """A flow and what it is given. An empty value is left to the flow."""

    flow: str
    """`rft`, `sft`, `pipeline`, `evaluate` or `convert`."""
    config: str
    """Path of the YAML file."""
    overrides: tuple[str, ...] = ()
    stage: str = ""
    which: str = ""
    """The checkpoints that `evaluate` scores."""
    checkpoint_dir: str = ""
    """The folder in which `convert` looks for checkpoints."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of a deployment's run."""
        more = {"stage": self.stage, "which": self.which, "checkpoint_dir": self.checkpoint_dir}
        given = {name: value for name, value in more.items() if value}
        return {"config": self.config, "overrides": list(self.overrides), **given}

    @property
    def command(self) -> list[str]:
        """The arguments of `trinity`."""
        if self.flow == "convert":
            return ["convert", "--checkpoint-dir", self.checkpoint_dir]
        if self.flow != "evaluate":
            return ["run", "--config", self.config, *self.overrides]
        options = {"--which": self.which, "--stage": self.stage}
        given = [word for name, value in options.items() if value for word in (name, value)]
        return ["evaluate", "--config", self.config, *given, *self.overrides]


TRINITY = [sys.executable, "-m", "flows.cli"]


@dataclass(frozen=True, slots=True)
class StartedProcess:
    """A process that was started here. The start time tells it from a later one with the same id."""

    pid: int
    started: float
    """Unix seconds."""
    launch: Launch
    project: str
    name: str
    log: str
    """File that holds its output."""
    mark: str = ""
    """`start_mark`."""

    def alive(self) -> bool:
        """True if this very process still runs."""
        return still_runs(self.pid, self.started, self.mark)

    def last_line(self) -> str:
        """What it has printed last."""
        path = Path(self.log)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def cancel(self) -> None:
        """Ask it to end, if it has not: training saves at its next step boundary."""
        if self.alive():
            psutil.Process(self.pid).terminate()


def start_process(launch: Launch, project: str, name: str, settings: StudioSettings) -> StartedProcess:
    """Start a command of `trinity` in a session of its own. Raises OSError."""
    settings.state.mkdir(parents=True, exist_ok=True)
    count = len([*settings.state.glob("*.json")])
    log = settings.state / f"{count:04d}_{launch.flow}.log"
    process = start_detached([*TRINITY, *launch.command], log, _environment(settings), settings.root)
    started = psutil.Process(process.pid).create_time()
    own = StartedProcess(process.pid, started, launch, project, name, str(log), start_mark(process.pid))
    write_json(log.with_suffix(".json"), asdict(own))
    return own


def started_processes(state: Path) -> list[StartedProcess]:
    """Every process that was started here, the newest first."""
    records = (read_json(path) for path in sorted(state.glob("*.json"), reverse=True))
    return [_process(record) for record in records if record]


def trinity(arguments: list[str], settings: StudioSettings, seconds: float) -> subprocess.CompletedProcess[str]:
    """A command of `trinity`, to its end. Raises subprocess.TimeoutExpired."""
    return subprocess.run(
        [*TRINITY, *arguments], cwd=settings.root, env=_environment(settings), capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip


def _process(record: dict[str, Any]) -> StartedProcess:
    launch = record["launch"]
    return StartedProcess(**record | {"launch": Launch(**launch | {"overrides": tuple(launch["overrides"])})})


def _environment(settings: StudioSettings) -> dict[str, str]:
    """Ours without the token, and with Prefect's API, which shows the run then."""
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return inherited | ({"PREFECT_API_URL": settings.api_url} if settings.api_url else {})
