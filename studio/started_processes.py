"""Runs that Studio has started as processes of this machine. They outlive Studio; a file records each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from studio.access import TOKEN_VARIABLE
from studio.launch import Launch
from studio.surroundings import Surroundings
from trinity_core.files import read_json, write_json
from trinity_core.runtime.processes import still_runs

TRINITY = [sys.executable, "-m", "flows.cli"]
VALIDATE_SECONDS = 120.0


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

    def alive(self) -> bool:
        """True if this very process still runs."""
        return still_runs(self.pid, self.started)

    def last_line(self) -> str:
        """What it has printed last."""
        path = Path(self.log)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def cancel(self) -> None:
        """Ask it to end, if it has not: training saves at its next step boundary."""
        if self.alive():
            psutil.Process(self.pid).terminate()


def start_process(launch: Launch, project: str, name: str, around: Surroundings) -> StartedProcess:
    """Start a command of `trinity` in a session of its own. Raises OSError."""
    around.state.mkdir(parents=True, exist_ok=True)
    count = len([*around.state.glob("*.json")])
    log = around.state / f"{count:04d}_{launch.flow}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*TRINITY, *launch.command],
            cwd=around.root,
            env=_environment(around),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    own = StartedProcess(process.pid, started, launch, project, name, str(log))
    write_json(log.with_suffix(".json"), asdict(own))
    return own


def started_processes(state: Path) -> list[StartedProcess]:
    """Every process that was started here, the newest first."""
    records = (read_json(path) for path in sorted(state.glob("*.json"), reverse=True))
    return [_process(record) for record in records if record]


def refusals(file: Path, around: Surroundings) -> list[str]:
    """Why a run of this file could not start, by `trinity validate`, which opens what the file names.

    In a process of its own, as modules of the file's `plugin_dir` are loaded.
    """
    command = [*TRINITY, "validate", "--config", str(file), "--json"]
    done = subprocess.run(
        command, cwd=around.root, env=_environment(around), capture_output=True, text=True, timeout=VALIDATE_SECONDS
    )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return [done.stderr.strip() or f"`trinity validate` ended with {done.returncode}"]
    return [f"{each['key']}: {each['message']}" for each in found["problems"]]


def _process(record: dict[str, Any]) -> StartedProcess:
    launch = record["launch"]
    return StartedProcess(**record | {"launch": Launch(**launch | {"overrides": tuple(launch["overrides"])})})


def _environment(around: Surroundings) -> dict[str, str]:
    """Ours without the token, and with Prefect's API, which shows the run then."""
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    return inherited | ({"PREFECT_API_URL": around.api_url} if around.api_url else {})
