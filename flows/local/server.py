"""The Prefect server on this machine: temporary for `trinity run`, permanent with a worker for `trinity up`.

Both listen on the loopback interface only, ask every client for the folder's key, and keep their SQLite database in
`./.trinity`, so that the UI still shows earlier runs. This module imports no Prefect: the server starts while
everything else is being imported, at almost no cost in time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.children import start_detached
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, from_record, read_json, write_json
from trinity_core.base.gate import ELSEWHERE, make_state_dir, server_key, state_dir
from trinity_core.base.processes import end, family, start_mark, still_runs
from trinity_core.base.waits import poll

START_SECONDS = 180.0
"""A new database takes a minute on a busy machine."""
STOP_SECONDS = 10.0
EVENT_SECONDS = {"prefect.artifact.updated": 3600, "prefect.flow-run.heartbeat": 7 * 86400}
"""How long Prefect keeps these events. An artifact event contains the whole picture of the learning curve; in Prefect's
default of seven days they would grow to gigabytes."""
_HERE = build_opener(ProxyHandler({}))
"""Sends requests to this machine without proxies."""


def log_file(name: str, root: Path) -> Path:
    return state_dir(root) / "log" / f"{name}.log"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that was started here. Its start mark distinguishes it from a later one with the same id."""

    name: str
    pid: int
    started: float
    mark: str = ""
    url: str = ""
    """Address of the page that it serves."""
    note: str = ""
    """File that holds this address while the page is served."""

    @classmethod
    def of(cls, name: str, pid: int, url: str = "", note: str = "") -> Process:
        return cls(name, pid, psutil.Process(pid).create_time(), start_mark(pid), url, note)

    def alive(self) -> bool:
        """True if this process, not a later one with its id, still runs."""
        return still_runs(self.pid, self.started, self.mark)

    def stop(self, grace: float = 30.0, with_children: bool = True) -> None:
        """End it with SIGTERM, and SIGKILL after `grace` seconds; by default with its descendants."""
        with suppress(psutil.NoSuchProcess):
            if self.alive():
                process = psutil.Process(self.pid)
                members = family(process) if with_children else [process]
                process.terminate()
                end(members, grace)


@dataclass(slots=True)
class UpState:
    """The record of what `trinity up` has started."""

    api_url: str
    processes: list[Process] = field(default_factory=list)
    began: float = 0.0
    """Unix seconds of the first `up`, since when killed runs are restarted; 0 until its supervisor starts."""
    deployed: str = ""
    """Digest of the prefect.yaml whose deployments this server has; "" until it has any."""

    def save(self, root: Path) -> None:
        write_json(make_state_dir(root) / "up.json", asdict(self))

    @classmethod
    def load(cls, root: Path) -> UpState | None:
        """Read the record; None if nothing was started here, or (with a warning) if it is unreadable."""
        path = state_dir(root) / "up.json"
        with clear_errors("reading", path, ELSEWHERE):
            record = read_json(path)
        if not record:
            return None
        record = {name: value for name, value in record.items() if name not in ("pages", "notes")}  # of older releases
        processes = [from_record(Process, process, path) for process in record["processes"]]
        return from_record(cls, record | {"processes": processes}, path)

    def named(self, name: str) -> list[Process]:
        return [process for process in self.processes if process.name == name]

    def running(self, name: str) -> list[Process]:
        return [process for process in self.named(name) if process.alive()]

    def is_at(self, api_url: str) -> bool:
        """True if this address leads to the server."""
        return api_url.rstrip("/").replace("//localhost:", f"//{LOOPBACK}:") == self.api_url

    def add(self, process: Process) -> None:
        """Add a process, or put it in the place of an earlier one of its name: `down` stops them from last to first."""
        names = [other.name for other in self.processes]
        index = names.index(process.name) if process.name in names else len(names)
        self.processes[index : index + 1] = [process]

    def record(self, process: Process, root: Path) -> None:
        """Add a process that has just started, and save: `down` finds it even if this command is killed next."""
        self.add(process)
        self.save(root)

    @staticmethod
    def forget(root: Path) -> None:
        (state_dir(root) / "up.json").unlink(missing_ok=True)


def prefect_environment(root: Path) -> dict[str, str]:
    """Return environment variables for every process that we start on this machine; the user's own values win.

    They contain settings of Prefect, and NO_PROXY for this machine.
    """
    home = os.environ.get("PREFECT_HOME", str(state_dir(root) / "prefect"))
    ours = {
        "PREFECT_HOME": home,
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # messages logged before a flow begins
        "PREFECT_SERVER_SERVICES_DB_VACUUM_EVENT_RETENTION_OVERRIDES": json.dumps(EVENT_SECONDS),
        # Leases in memory would end with the server, and Prefect ends runs of a deployment that has lost its lease.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_MEMO_STORE_PATH": str(Path(home).expanduser() / "memo_store.toml"),  # else in ~/.prefect
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()} | _without_proxy()


def client_environment(api_url: str, root: Path) -> dict[str, str]:
    """Return `prefect_environment` for a client of this folder's server at `api_url`."""
    return prefect_environment(root) | {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": server_key(root)}


def server_environment(api_url: str, root: Path) -> dict[str, str]:
    return client_environment(api_url, root) | {
        "PREFECT_SERVER_API_AUTH_STRING": server_key(root),
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # `prefect deployment run --watch` shows the log, too.
        "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED": "true",
        "PREFECT_SERVER_LOGS_STREAM_PUBLISHING_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": "/api",  # of the page's own host, which may be `localhost` or a forwarded port
    }


def serve_command(*options: str) -> list[str]:
    """Return the command that serves Prefect in the current directory's folder."""
    return [sys.executable, "-m", "uvicorn", "--factory", "flows.local.prefect_app:make_app", *options]


def _without_proxy() -> dict[str, str]:
    lower, upper = (os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    return {"no_proxy": _and_here(lower or upper), "NO_PROXY": _and_here(upper or lower)}


def _and_here(hosts: str) -> str:
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    return hosts if "*" in names else ",".join(dict.fromkeys([*names, LOOPBACK, "localhost"]))


def is_healthy(api_url: str) -> bool:
    return answers(f"{api_url}/health")


def answers(url: str) -> bool:
    """True if this address on this machine answers with success."""
    try:
        with _HERE.open(url, timeout=2) as answer:
            return answer.status == 200
    except (OSError, HTTPException):
        return False


def start_process(
    name: str,
    command: list[str],
    env: Mapping[str, str],
    root: Path,
    outlive_us: bool = True,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process with these additional variables; its output goes to `.trinity/log/<name>.log`."""
    path = log_file(name, root)
    with clear_errors("writing", path, ELSEWHERE):
        make_state_dir(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        return start_detached(command, path, {**os.environ, **env}, root, outlive_us, descriptors)


class TemporaryServer:
    """A Prefect API for one `trinity run`, without UI and services. It starts at once; `wait` blocks until it answers.

    It inherits a listening socket, so that no other process can take the port first.
    """

    def __init__(self, root: Path) -> None:
        self.log = log_file("temporary-server", root)
        with socket.create_server((LOOPBACK, 0)) as listener:
            self.api_url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/api"
            command = serve_command("--fd", str(listener.fileno()), "--log-level", "error", "--lifespan", "on")
            environment = server_environment(self.api_url, root) | {
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
                "PREFECT_API_DATABASE_MIGRATE_ON_START": "true",
            }
            self._process = start_process(
                "temporary-server", command, environment, root, outlive_us=False, descriptors=[listener.fileno()]
            )

    def wait(self) -> None:
        wait_until_healthy(self.api_url, lambda: not self.has_ended(), self.log)

    def has_ended(self) -> bool:
        """True if the server has ended other than by `stop`."""
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)


def comes_up(url: str, is_alive: Callable[[], bool], seconds: float) -> bool:
    """Wait until the address answers. Return False if its process ends first, or takes too long."""
    for _ in poll(seconds, pause=0.05):
        if answers(url):
            return True
        if not is_alive():
            break
    return False


def wait_until_healthy(api_url: str, is_alive: Callable[[], bool], log: Path) -> None:
    """Wait until the server answers. Raises TrinityError with the end of its log if it ends or takes too long."""
    if comes_up(f"{api_url}/health", is_alive, START_SECONDS):
        return
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise TrinityError(f"The Prefect server at {api_url} did not come up. The end of {log}:\n{tail}")
