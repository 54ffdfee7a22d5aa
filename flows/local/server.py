"""The Prefect server of this machine: a temporary one for `trinity run`, a lasting one with worker for `trinity up`.

Both listen on the loopback interface only and keep their SQLite database in `./.trinity`, so that a run of yesterday is
seen in the UI of today. This module imports no Prefect: a server that starts while everything else is imported costs
hardly any time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil

from trinity_core.addresses import LOOPBACK, free_port
from trinity_core.errors import TrinityError
from trinity_core.files import clear_errors, read_json, write_json
from trinity_core.runtime.processes import end, still_runs, stop

log = logging.getLogger(__name__)

START_SECONDS = 180.0
"""A new database on a busy machine takes a minute."""
STOP_SECONDS = 10.0
"""For a server to end in order, and for the kernel to end it otherwise."""
LOOK_SECONDS = 2.0
"""Between two looks at the temporary server."""
SILENCE_SECONDS = 40.0
"""Without being ready for so long a server counts as hung."""
MAX_STARTS = 2
"""Times that the temporary server is started again without ever answering; then the run goes on without it."""
PREFECT, AGREEABLE = ("--factory", "prefect.server.api.server:create_app"), ("flows.local.agreeable:app",)
"""What the temporary server serves; and what takes its place."""
ELSEWHERE = "work in another folder"
_HERE = build_opener(ProxyHandler({}))
"""No proxy knows this machine's loopback interface."""


def state_dir(root: Path | None = None) -> Path:
    """`./.trinity`: databases, logs and the record of what runs."""
    return (root or Path.cwd()).absolute() / ".trinity"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was started here. The start time tells it from a later one with the same id."""

    name: str
    pid: int
    started: float

    @classmethod
    def of(cls, name: str, pid: int) -> Process:
        """The record of a running process."""
        return cls(name, pid, psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return still_runs(self.pid, self.started)

    def terminate_children(self) -> None:
        """Send SIGTERM to its child processes."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children() if self.alive() else []:
                with suppress(psutil.NoSuchProcess):
                    child.terminate()

    def stop(self, grace: float = 30.0) -> None:
        """End it and its children: SIGTERM, and SIGKILL for what is left after `grace` seconds."""
        with suppress(psutil.NoSuchProcess):
            if self.alive():
                stop(psutil.Process(self.pid), grace)

    def stop_alone(self, grace: float) -> None:
        """End it, and leave its children alone."""
        with suppress(psutil.NoSuchProcess):
            if self.alive():
                psutil.Process(self.pid).terminate()
                end([psutil.Process(self.pid)], grace)


@dataclass(frozen=True, slots=True)
class UpState:
    """What `trinity up` has started."""

    api_url: str
    processes: list[Process]
    pages: dict[str, str] = field(default_factory=dict)
    """Name of a process -> the address of the page that it serves."""
    notes: list[str] = field(default_factory=list)
    """Files that say where the pages are, as long as they are served."""

    def save(self, root: Path | None = None) -> None:
        """Write the record."""
        path = state_dir(root) / "up.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))

    @classmethod
    def load(cls, root: Path | None = None) -> UpState | None:
        """The record, or None where nothing was started here or the record cannot be read, which is warned of."""
        path = state_dir(root) / "up.json"
        with clear_errors("reading", path, ELSEWHERE):
            kept = read_json(path)
        return None if kept is None else cls(**kept | {"processes": [Process(**each) for each in kept["processes"]]})

    def named(self, name: str) -> list[Process]:
        """The processes of that name, at most one."""
        return [process for process in self.processes if process.name == name]

    def replace(self, process: Process) -> UpState:
        """The record with this process in the place of the one of its name."""
        others = [each for each in self.processes if each.name != process.name]
        return dataclasses.replace(self, processes=[*others, process])

    @staticmethod
    def forget(root: Path | None = None) -> None:
        """Remove the record."""
        (state_dir(root) / "up.json").unlink(missing_ok=True)


def prefect_environment(root: Path | None = None) -> dict[str, str]:
    """Environment variables of every process that we start on this machine; those that the user has set stay.

    They are Prefect's settings, and make its server be asked without a proxy.
    """
    ours = {
        "PREFECT_HOME": str(state_dir(root) / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "trinity_core,tasks",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # what is logged before a flow begins
        "PREFECT_SERVER_MEMO_STORE_PATH": str(state_dir(root) / "prefect" / "memo_store.toml"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()} | _without_proxy()


def _without_proxy() -> dict[str, str]:
    """NO_PROXY in both spellings, of which programs prefer one or the other, with this machine added."""
    lower, upper = (os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    return {"no_proxy": _and_here(lower or upper), "NO_PROXY": _and_here(upper or lower)}


def _and_here(hosts: str) -> str:
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    return hosts if "*" in names else ",".join(dict.fromkeys([*names, LOOPBACK, "localhost"]))


def is_healthy(api_url: str) -> bool:
    """Whether a server answers there."""
    return answers(f"{api_url}/health")


def is_ready(api_url: str) -> bool:
    """Whether a server answers there that reaches its database."""
    return answers(f"{api_url}/ready")


def answers(url: str) -> bool:
    """Whether this address on this machine answers with success."""
    try:
        with _HERE.open(url, timeout=2) as answer:
            return answer.status == 200
    except (OSError, HTTPException):
        return False


def start_process(
    name: str, command: list[str], env: Mapping[str, str], root: Path | None = None, outlive_us: bool = True
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; its output goes to `.trinity/log/<name>.log`."""
    path = state_dir(root) / "log" / f"{name}.log"
    with clear_errors("writing", path, ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        output = path.open("ab")
    with output:
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=None if outlive_us else _die_with_parent,
        )


class TemporaryServer:
    """A Prefect API for one `trinity run`, without UI and services: started at once, waited for when it is needed.

    From then on it is started again on the same port and database if it ends or does not answer for long. If that is of
    no use, a server that agrees to everything takes its place for the rest of the run.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._note = _migration_note(root)
        self.port = free_port()
        self.api_url = f"http://{LOOPBACK}:{self.port}/api"
        self._app: tuple[str, ...] = PREFECT
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep_up, name="prefect-server", daemon=True)
        self._process = self._start()

    def wait(self) -> None:
        """Wait until the server answers. Raises TrinityError if it does not come up."""
        wait_until_healthy(self.api_url, self._process, self._log)
        if self._note:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(version("prefect"))
        self._keeper.start()

    def stop(self) -> None:
        """End the server."""
        self._stopped.set()
        if self._keeper.is_alive():
            self._keeper.join(STOP_SECONDS)
        end_process(self._process)

    def _keep_up(self) -> None:
        """In a thread that lives as long as the server: Linux ends a process with the thread that started it."""
        failures, answered_at = 0, time.monotonic()
        while not self._stopped.wait(LOOK_SECONDS):
            alive = self._process.poll() is None
            if alive and is_ready(self.api_url):
                failures, answered_at = 0, time.monotonic()
            if alive and time.monotonic() - answered_at < SILENCE_SECONDS:
                continue
            failures += 1
            if self._app == PREFECT and failures <= MAX_STARTS:
                log.warning("Prefect's server has %s and is started again", "hung" if alive else "ended")
            elif self._app == PREFECT:
                self._app = AGREEABLE
                log.warning("Prefect's server cannot be started again; the run goes on without it. See %s", self._log)
            end_process(self._process)
            self._process, answered_at = self._start(), time.monotonic()

    def _start(self) -> subprocess.Popen[bytes]:
        return start_process("temporary-server", self._command(), self._environment(), self._root, outlive_us=False)

    @property
    def _log(self) -> Path:
        return state_dir(self._root) / "log" / "temporary-server.log"

    def _command(self) -> list[str]:
        options = ["--host", LOOPBACK, "--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
        return [sys.executable, "-m", "uvicorn", *self._app, *options]

    def _environment(self) -> dict[str, str]:
        """Migrations take 3 s even with nothing to migrate: they are skipped for a database of this version."""
        known = self._note is not None and _migrated_by(self._note) == version("prefect")
        return prefect_environment(self._root) | {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            "PREFECT_API_DATABASE_MIGRATE_ON_START": "false" if known else "true",
        }


def end_process(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL after `STOP_SECONDS`."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)


def _migration_note(root: Path | None) -> Path | None:
    """Beside the database: the version of Prefect that has migrated it. None for a database that the user names."""
    parts = ("CONNECTION_URL", "DRIVER", "NAME")
    if any(f"PREFECT_{owner}_DATABASE_{part}" in os.environ for owner in ("API", "SERVER") for part in parts):
        return None
    return (root or Path.cwd()) / Path(prefect_environment(root)["PREFECT_HOME"]).expanduser() / "migrated"


def _migrated_by(note: Path) -> str:
    return note.read_text() if note.exists() and note.with_name("prefect.db").exists() else ""


def wait_until_healthy(api_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers; raises TrinityError with the end of its log if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not is_healthy(api_url):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise TrinityError(f"The Prefect server at {api_url} did not come up. The end of {log}:\n{tail}")
        time.sleep(0.05)


def _die_with_parent() -> None:
    """In a child before it starts: Linux ends it when we are gone, even by SIGKILL."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
