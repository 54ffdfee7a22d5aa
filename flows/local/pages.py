"""The further pages of `trinity up`: MLflow and Studio. Each is a process, on the loopback interface.

Pages are independent of runs: if a page's port is taken or its process ends, `up` warns and continues.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from flows.local.connection import known_server
from flows.local.server import (
    Process,
    UpState,
    answers,
    client_environment,
    log_file,
    prefect_environment,
    start_process,
)
from trinity_core.base.addresses import LOOPBACK, STUDIO_PORT, page_note
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import private_folder, write_json
from trinity_core.base.gate import make_state_dir
from trinity_core.base.waits import poll
from trinity_core.exchange.tracking.mlflow_server import HEALTH as MLFLOW_HEALTH
from trinity_core.exchange.tracking.mlflow_writer import default_uri, describe_runs, fault_of, serve_command

MLFLOW_PORT = 5000
START_SECONDS = 120.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Page:
    """A web server on this machine; `trinity up` serves it if its port is free."""

    name: str
    """Name of its process, its log and its option, `--<name>-port`."""
    title: str
    port: int
    command: Sequence[str]
    """Command that serves the page at 127.0.0.1 and this port until it gets SIGTERM."""
    health: str = "/"
    """The path that answers once the page is served."""
    home: str = ""
    """The path that people open first."""
    notes: Mapping[Path, str] = field(default_factory=dict)
    """Files that hold the page's address while it is served → URI of the store that it shows, or ""."""
    meanwhile: Callable[[], None] = lambda: None
    """Called while the page starts."""
    unfit: str = ""
    """Why it cannot be served."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def mlflow_page(root: Path, port: int = MLFLOW_PORT) -> Page:
    """Return MLflow's page for the runs below TRINITY_CHECKPOINT_ROOT_DIR or `./checkpoints`, each with links to it."""
    checkpoints = _checkpoints(root)
    uri = default_uri(checkpoints)
    command = [*serve_command(uri, checkpoints), "--port", str(port)]
    home, notes = "/#/experiments?workflowType=machine_learning", {page_note(checkpoints, "mlflow"): uri}
    return Page("mlflow", "MLflow", port, command, MLFLOW_HEALTH, home, notes, unfit=fault_of(uri, root))


def studio_page(root: Path, port: int = STUDIO_PORT) -> Page:
    """Return Studio's page with the same runs, each with links to it, and the configurations below `root`."""
    command = [sys.executable, "-m", "studio", "--port", str(port)]
    checkpoints = _checkpoints(root)
    notes, describe = {page_note(checkpoints, "studio"): ""}, partial(describe_runs, checkpoints)
    return Page("studio", "Studio", port, command, "/_stcore/health", "/runs", notes, describe)


def _checkpoints(root: Path) -> Path:
    return (root / Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR") or "checkpoints").expanduser()).absolute()


def serve_studio(root: Path, file: Path, plugin_dir: Path | None, host: str, port: int) -> NoReturn:
    """Replace this process by Studio's server, with the Prefect API of `known_server`; Ctrl-C or SIGTERM ends it."""
    server = known_server(root)
    if not port_is_free(port, host):
        raise TrinityError(
            f"Port {port} is in use, maybe by another Studio. Choose another one with `trinity studio --port N`.",
            key="--port",
        )
    command = [sys.executable, "-m", "studio", str(file), "--host", host, "--port", str(port)]
    command += ["--plugin-dir", str(plugin_dir)] if plugin_dir else []
    env = prefect_environment(root) | server
    with suppress(OSError):  # Prefect creates its home but no folder above it, and would warn
        make_state_dir(root)
        Path(env["PREFECT_HOME"]).expanduser().mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **env})  # noqa: S606 - no shell is wanted


def start_page(root: Path, page: Page, state: UpState, say: Say) -> bool:
    """Start a page without waiting for it, and record it in `state`; warn and return False if it cannot be served."""
    unfit = page.unfit
    if not unfit and not port_is_free(page.port):
        unfit = f"Port {page.port} is in use: choose another one with `trinity up --{page.name}-port N` (0: no page)."
    if unfit:
        say(f"warning: {page.title} is not served. {unfit}")
        return False
    say(f"Starting {page.title} on port {page.port} …")
    for note, uri in page.notes.items():
        private_folder(note.parent)
        write_json(note, {"url": page.url, "uri": uri})
    env = client_environment(state.api_url, root)
    state.add(Process.of(page.name, start_process(page.name, [*page.command], env, root).pid))
    state.pages[page.name] = page.url
    state.notes[:] = sorted({*state.notes, *map(str, page.notes)})
    return True


def wait_for_page(root: Path, page: Page, process: Process, say: Say) -> None:
    """Wait until the page answers; warn if it ends first, or takes too long."""
    for _ in poll(START_SECONDS, pause=0.1):
        if answers(f"{page.url}{page.health}"):
            return
        if not process.alive():
            break
    say(f"warning: {page.title} does not answer at {page.url}. See {log_file(page.name, root)}")


def port_is_free(port: int, host: str = LOOPBACK) -> bool:
    """True if nothing listens on this port of the host, by default the loopback interface.

    Also true if the host is not an address of this machine; the server reports that.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()  # connections in TIME_WAIT do not count
    except OSError as error:
        return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return True
