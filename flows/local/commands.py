"""`trinity up`, `down`, `status`: Prefect server, work pool, one worker, all deployments and pages, on this machine.

The further pages are MLflow and Studio, each a process. They are independent of runs: if a page's port is taken or its
process ends, `up` warns and continues.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import psutil

from flows.local.connection import known_server
from flows.local.deployments import deploy
from flows.local.notifications import set_notifications
from flows.local.server import (
    Process,
    UpState,
    answers,
    client_environment,
    comes_up,
    is_healthy,
    log_file,
    prefect_environment,
    serve_command,
    server_environment,
    start_process,
    wait_until_healthy,
)
from flows.local.worker import (
    END_SECONDS,
    RESTARTS,
    end_processes,
    make_pool,
    mark_ended,
    pause_pool,
    pool_is_shared,
    process_of,
    start_supervisor,
    start_worker,
    unfinished_runs,
)
from flows.project import NO_SERVER, SETTINGS_FILE, SETTINGS_NOTE, WRITTEN
from tasks.prefect_api import api_client
from tasks.retries import api_faults
from trinity_core.base.addresses import LOOPBACK, STUDIO_PORT, page_address, page_note
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import clear_errors, file_digest, private_folder, read_json, write_atomically, write_json
from trinity_core.base.gate import ELSEWHERE, key_file, make_state_dir, server_key, state_dir
from trinity_core.base.processes import require_limits
from trinity_core.base.runlock import one_at_a_time
from trinity_core.base.waits import poll
from trinity_core.exchange.tracking.mlflow_root import default_uri
from trinity_core.exchange.tracking.mlflow_server import HEALTH as MLFLOW_HEALTH
from trinity_core.exchange.tracking.mlflow_server import RUNS as MLFLOW_RUNS
from trinity_core.exchange.tracking.mlflow_writer import describe_runs, fault_of
from trinity_core.exchange.tracking.mlflow_writer import serve_command as mlflow_command
from trinity_core.exchange.tracking.run_record import read_record, record_path

UP_SECONDS = 600.0
"""Time for another `up` or `down` to end, including server start, deployments and pages."""
BUSY_SECONDS = 10.0
"""Time for the server to answer `down`: else runs end by signals and save too, but Prefect does not hear of it."""
STOP_SECONDS = 15.0
MLFLOW_PORT = 5000
PAGE_SECONDS = 120.0
TITLES = {"mlflow": "MLflow", "studio": "Studio"}
"""Page → its title."""
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
    unfit: str = ""
    """Why it cannot be served."""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


def up(root: Path, port: int, say: Say, restarts: int = RESTARTS, pages: Sequence[Page] = ()) -> UpState:
    """Start everything that is not running, and deploy a changed prefect.yaml; worker, pages and runs in progress stay.
    If a step fails, what this call has started is stopped again.

    A killed run is restarted, at most `restarts` times an hour. If a page cannot be served, `say` a warning and
    continue. Waits for another `up` or `down` in this folder.
    """
    require_limits()
    with _alone(root):
        if not (root / "prefect.yaml").exists():
            raise TrinityError(f"There is no prefect.yaml in {root}: call `trinity up` in the deployments' folder.")
        state = UpState.load(root)
        if state is None:
            state = UpState(_free_api_url(port))
        elif not any(process.alive() for process in state.processes):
            _down(root, say)
            state = UpState(_free_api_url(port), began=state.began)
        earlier = list(state.processes)
        with ExitStack() as on_failure:
            if not earlier:
                on_failure.callback(_forget, root, state)
            on_failure.callback(lambda: _stop([process for process in state.processes if process not in earlier], say))
            serves_again = not state.running("server")
            if serves_again:
                if earlier:
                    _make_way(root, state, say)
                _start_server(root, state, say)
            else:
                say(f"Already up: {state.api_url.removesuffix('/api')}")
            _deploy_changes(root, state, say)
            if serves_again and not state.running("worker"):
                # Runs killed by a power cut are restarted; those of `down` are not.
                _mark_left_runs(root, state.api_url, say, again=bool(state.began and restarts))
            _notify(root, state.api_url, say)
            served = [page for page in pages if not state.running(page.name) and start_page(root, page, state, say)]
            if not state.running("worker"):
                say("Starting the worker …")
                state.record(start_worker(root, state.api_url), root)
            if not state.running("supervisor"):
                say("Starting the supervisor …")
                state.began = state.began or time.time()
                state.record(start_supervisor(root, state.api_url, state.began, restarts), root)
            on_failure.pop_all()
        if served:
            describe_runs(_checkpoints(root))
        for page in served:
            [process] = state.named(page.name)
            if not comes_up(f"{page.url}{page.health}", process.alive, PAGE_SECONDS):
                say(f"warning: {page.title} does not answer at {page.url}. See {log_file(page.name, root)}")
        _warn_of_another_server(state, say)
        return state


def _make_way(root: Path, state: UpState, say: Say) -> None:
    """Prepare the start of a server in place of one that has ended, at the address that worker and runs know. Raises
    TrinityError if it is taken."""
    port = urlsplit(state.api_url).port or 0
    if not port_is_free(port):
        raise TrinityError(
            f"Prefect's server has ended, and port {port}, where worker and runs expect it, is in use. Free the port, "
            "or call `trinity down`, which lets the runs save, and `trinity up --port N`."
        )
    _stop_supervisor(root, state, say)


def _stop_supervisor(root: Path, state: UpState, say: Say) -> None:
    """Stop the supervisor and take over its worker: it may have started another one."""
    _stop(state.named("supervisor"), say)
    for worker in (UpState.load(root) or state).named("worker"):
        state.add(worker)


def _free_api_url(port: int) -> str:
    """Return the API address for a new server. Raises TrinityError if the port is taken."""
    if not port_is_free(port):
        raise TrinityError(f"Port {port} is in use. Choose another one with `trinity up --port N`.", key="--port")
    return f"http://{LOOPBACK}:{port}/api"


def _start_server(root: Path, state: UpState, say: Say) -> None:
    port = urlsplit(state.api_url).port
    say(f"Starting the Prefect server on port {port} …")
    start = serve_command("--host", LOOPBACK, "--port", str(port), "--log-level", "warning")
    server = start_process("server", start, server_environment(state.api_url, root), root)
    state.deployed = ""
    state.record(Process.of("server", server.pid), root)


def _deploy_changes(root: Path, state: UpState, say: Say) -> None:
    """Create the deployments once the server answers, unless it has those of this prefect.yaml; the first time also the
    work pool."""
    digest = file_digest(root / "prefect.yaml")
    if digest == state.deployed:
        return
    [server] = state.named("server")
    wait_until_healthy(state.api_url, server.alive, log_file("server", root))
    if state.deployed:
        say("prefect.yaml has changed: creating its deployments …")
    else:
        say("Creating the work pool and the deployments …")
        write_settings(root, state.api_url)
        make_pool(root, state.api_url)
    deploy(root, state.api_url, say)
    state.deployed = digest
    state.save(root)


def _notify(root: Path, api_url: str, say: Say) -> None:
    """Set what prefect.yaml says now; with a warning nothing, if Prefect does not answer."""
    try:
        if notified := set_notifications(root, api_url):
            say(f"The webhook of prefect.yaml hears of runs that have: {notified}")
    except api_faults() as error:
        say(f"Warning: notifications stay as they were, because Prefect does not answer: {error}")


def down(root: Path, say: Say) -> bool:
    """Stop everything that `up` started here: the worker's runs (which save, as after a cancellation), the worker, and
    the server. Return False if nothing was running."""
    with _alone(root) if state_dir(root).is_dir() else nullcontext():
        was_up = _down(root, say)
    for pid, runs in led_by_commands(_checkpoints(root)).items():
        say(f"Still running, by a command or Studio: {', '.join(runs)}. `kill {pid}` lets its process save and end.")
    return was_up


def led_by_commands(checkpoints: Path) -> dict[int, list[str]]:
    """Return process → runs below the checkpoints that it works on, on this machine."""
    runs: dict[int, list[str]] = {}
    for path in sorted(checkpoints.glob(str(record_path(Path("*/*"))))):
        record, folder = read_record(path.parents[1]), path.parents[1]
        if record is not None and record.works_here:
            runs.setdefault(record.pid, []).append(f"{folder.parent.name}/{folder.name}")
    return runs


def _alone(root: Path) -> AbstractContextManager[None]:
    """Allow only one `up` or `down` at a time in a folder: with two servers on one port, one would answer for both."""
    path = state_dir(root) / "up.lock"
    with clear_errors("locking", path, ELSEWHERE):
        make_state_dir(root)
    return one_at_a_time(path, UP_SECONDS, instead=ELSEWHERE)


def _down(root: Path, say: Say) -> bool:
    state = UpState.load(root)
    if state is None:
        remove_settings(root)
        return False
    _stop_supervisor(root, state, say)
    if state.running("server") and any(is_healthy(state.api_url) for _ in poll(BUSY_SECONDS)):
        _end_runs(root, state, say)
    _stop(state.processes, say)
    _forget(root, state)
    return True


def status(root: Path) -> list[str]:
    state = UpState.load(root)
    if state is None:
        return ["Nothing is running in this folder. Start it with `trinity up`."]
    health = "answers" if is_healthy(state.api_url) else "does not answer"
    lines = [f"{state.api_url.removesuffix('/api')} {health}"]
    states = [
        "running" if process.alive() else f"gone; see {log_file(process.name, root)}" for process in state.processes
    ]
    rows = [(process.name, f"pid {process.pid} {now}") for process, now in zip(state.processes, states, strict=True)]
    rows += [(process.name, process.url) for process in state.processes if process.url]
    rows += [("key", str(key_file(root))), ("logs", str(state_dir(root) / "log"))]
    width = max(len(name) for name, _ in rows)
    return [*lines, *(f"{name:{width}}  {text}" for name, text in rows)]


def write_settings(root: Path, api_url: str) -> None:
    """Write the server's address and key for `prefect` in this folder; a user's own file is never changed."""
    path = root / SETTINGS_FILE
    lines = (f'url = "{api_url}"', f'auth_string = "{server_key(root)}"')
    if path.exists() and not (text := path.read_text()).startswith(WRITTEN):
        if all(line in text for line in lines):
            return
        raise TrinityError(
            f'{path} was not written by `trinity up`: move it away, or put `{lines[0]}` and `auth_string = "…"`, with '
            f"the key in {key_file(root)}, below [api] in it."
        )
    write_atomically(path, "\n".join([f"{SETTINGS_NOTE}[api]", *lines, ""]).encode(), mode=0o600)


def remove_settings(root: Path) -> None:
    """Remove the server's address and key from what `write_settings` wrote."""
    path = root / SETTINGS_FILE
    if path.exists() and path.read_text().startswith(WRITTEN):
        write_atomically(path, NO_SERVER.encode(), mode=0o600)


def _forget(root: Path, state: UpState) -> None:
    """Remove the record, the settings and the notes of pages, except one that another folder has written since."""
    remove_settings(root)
    for process in state.processes:
        if process.note and read_json(Path(process.note)).get("url") == process.url:
            Path(process.note).unlink(missing_ok=True)
    UpState.forget(root)


def _warn_of_another_server(state: UpState, say: Say) -> None:
    """Warn if PREFECT_API_URL points elsewhere: it overrides the address in our `prefect.toml`, but not the key."""
    users = os.environ.get("PREFECT_API_URL", "")
    if users and not state.is_at(users):
        say(
            f"warning: `prefect` in this folder goes to PREFECT_API_URL={users}, not to {state.api_url}, and sends it "
            "this folder's key. First `unset PREFECT_API_URL`, or `export PREFECT_API_AUTH_STRING=` for that server."
        )


def _mark_left_runs(root: Path, api_url: str, say: Say, again: bool) -> None:
    """Mark runs that were killed with their worker or machine, before a new worker starts; live runs are kept.

    With `again`, the supervisor restarts those that had begun.
    """
    with api_client(api_url, server_key(root)) as client:
        if pool_is_shared(client, root):
            return
        for run in unfinished_runs(client):
            if process_of(run) is not None:
                say(f"The run {run.name} continued without Prefect's server.")
                continue
            mark_ended(client, [run], "Crashed", "Killed before `trinity up` started Prefect again")
            begun = again and run.state is not None and (run.state.is_running() or run.state.is_paused())
            resumes = "It is restarted and" if begun else f"`prefect flow-run retry {run.id}`"
            say(f"The run {run.name} was killed. {resumes} resumes from its checkpoint.")


def _end_runs(root: Path, state: UpState, say: Say) -> None:
    """End the pool's runs, then the worker before it takes new ones.

    If another folder's worker may own some of the runs, none is ended here; `_stop` sends our own runs SIGTERM.
    """
    try:
        with api_client(state.api_url, server_key(root)) as client:
            if pool_is_shared(client, root):
                return
            with pause_pool(client):
                runs = unfinished_runs(client)
                for run in runs:
                    say(f"Cancelling the run {run.name}: training saves at its next step boundary …")
                end_processes(runs)
                _stop(state.named("worker"), say)
                mark_ended(client, [*runs, *unfinished_runs(client)], "Cancelled", "`trinity down` has ended it")
    except api_faults() as error:
        say(f"Prefect does not answer, so the runs get SIGTERM: {error}")


def _stop(processes: Sequence[Process], say: Say) -> None:
    """Stop the processes, the last one first. A worker waits for its runs, so the runs get SIGTERM too. Children of the
    supervisor (a worker) and of Studio (runs started in the browser) stay."""
    for process in reversed(processes):
        if not process.alive():
            continue
        say(f"Stopping {TITLES.get(process.name, f'the {process.name}')} …")
        if process.name == "worker":
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    with suppress(psutil.NoSuchProcess):
                        child.terminate()
        grace = END_SECONDS if process.name == "worker" else STOP_SECONDS
        process.stop(grace, with_children=process.name not in ("supervisor", "studio"))


def mlflow_page(root: Path, port: int = MLFLOW_PORT) -> Page:
    """Return MLflow's page for the runs below TRINITY_CHECKPOINT_ROOT_DIR or `./checkpoints`, each with links to it."""
    checkpoints = _checkpoints(root)
    uri = default_uri(checkpoints)
    command = [*mlflow_command(uri, checkpoints), "--port", str(port)]
    return Page("mlflow", TITLES["mlflow"], port, command, MLFLOW_HEALTH, MLFLOW_RUNS, fault_of(uri, root))


def studio_page(root: Path, port: int = STUDIO_PORT) -> Page:
    """Return Studio's page with the same runs, each with links to it, and the configurations below `root`."""
    command = [sys.executable, "-m", "studio", "--port", str(port)]
    return Page("studio", TITLES["studio"], port, command, "/_stcore/health", "/runs")


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
    _become(command, root, prefect_environment(root) | server)


def serve_mcp(root: Path, port: int) -> NoReturn:
    """Replace this process by the server of tools for agents; without a port it talks over stdin and stdout."""
    command = [sys.executable, "-m", "flows.mcp_server", "--port", str(port)]
    _become(command, root, prefect_environment(root) | known_server(root))


def _become(command: list[str], root: Path, env: Mapping[str, str]) -> NoReturn:
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
    note = page_note(_checkpoints(root), page.name)
    other = page_address(note.parent, page.name)
    private_folder(note.parent)
    if not (other and answers(f"{other}{page.health}")):  # another folder's, which shows the same runs
        write_json(note, {"url": page.url})
    child = start_process(page.name, [*page.command], client_environment(state.api_url, root), root)
    state.record(Process.of(page.name, child.pid, page.url, str(note)), root)
    return True


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
