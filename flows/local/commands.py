"""`trinity up`, `down`, `status`: Prefect server, work pool, one worker, all deployments and pages, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from flows.local.pages import Page, port_is_free, start_page, wait_for_page
from flows.local.server import (
    Process,
    UpState,
    client_environment,
    is_healthy,
    locked,
    log_file,
    migration_environment,
    record_migration,
    server_environment,
    start_process,
    wait_until_healthy,
)
from flows.local.supervisor import RESTARTS, start_supervisor
from flows.local.worker import (
    END_SECONDS,
    end_processes,
    make_pool,
    mark_ended,
    pause_pool,
    pool_is_shared,
    process_of,
    renew_template,
    start_worker,
    unfinished_runs,
)
from tasks.prefect_api import api_client
from tasks.retries import api_faults
from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.errors import TrinityError
from trinity_core.base.files import write_atomically
from trinity_core.base.gate import key_file, server_key, state_dir
from trinity_core.base.processes import require_limits
from trinity_core.base.waits import poll

SETTINGS_FILE = "prefect.toml"
SETTINGS_NOTE = (
    "# Written by `trinity up`, so that `prefect` finds the server in this folder; `trinity down` removes it.\n"
)

UP_SECONDS = 600.0
"""Time for another `up` or `down` to end, including server start, deployments and pages."""
ANSWER_SECONDS = 60.0
"""Time for a server that is up to answer."""
BUSY_SECONDS = 10.0
"""Time for it to answer `down`: without it runs end by signals, and save too, but Prefect does not hear of it."""
PREFECT_SECONDS = 300.0


def up(
    root: Path, port: int, say: Callable[[str], None], restarts: int = RESTARTS, pages: Sequence[Page] = ()
) -> UpState:
    """Start everything that is not running. If a step fails, whatever was started is stopped again.

    A killed run is restarted, at most `restarts` times an hour. If a page cannot be served, `say` a warning and
    continue. Waits for another `up` or `down` in this folder.
    """
    require_limits()
    with _alone(root):
        return _up(root, port, say, restarts, pages)


def _up(root: Path, port: int, say: Callable[[str], None], restarts: int, pages: Sequence[Page]) -> UpState:
    state, began = UpState.load(root), datetime.now(UTC)
    if state and any(process.alive() for process in state.processes):
        state = _serve_again(root, state, say, restarts)
        served = _start_missing(root, state, pages, say, began, restarts)
    else:
        if state:
            _down(root, say)
        was_up, state = state is not None, UpState(_free_api_url(root, port), [])
        with ExitStack() as on_failure:
            on_failure.callback(_remove_notes, root, state)
            on_failure.callback(_stop, state.processes, say)
            _start_server(root, port, state, say)
            # Runs killed by a power cut are restarted; runs that `down` ended are not.
            _mark_left_runs(root, state.api_url, say, again=bool(was_up and restarts))
            since = began if was_up else datetime.now(UTC)
            served = _start_missing(root, state, pages, say, since, restarts)
            on_failure.pop_all()
    for page in served:
        page.meanwhile()
        wait_for_page(root, page, state.named(page.name)[0], say)
    _warn_of_another_server(state, say)
    return state


def _serve_again(root: Path, state: UpState, say: Callable[[str], None], restarts: int) -> UpState:
    """Start the server again if it has ended, and return the record. Worker, pages and runs in progress stay.

    Raises TrinityError if a server that still runs does not answer in time.
    """
    running = state.running("server")
    if not running:
        state = _without_supervisor(root, state, say)
        port = urlsplit(state.api_url).port or 0
        if not port_is_free(port):
            raise TrinityError(
                f"Prefect's server has ended, and port {port}, where worker and runs expect it, is in use. Free the "
                "port, or call `trinity down`, which lets the runs save, and `trinity up --port N`."
            )
        with ExitStack() as on_failure:
            on_failure.callback(lambda: _stop(state.named("server"), say))
            _start_server(root, port, state, say)
            on_failure.pop_all()
        state.save(root)
        if not state.running("worker"):
            _mark_left_runs(root, state.api_url, say, again=bool(restarts))
    elif any(is_healthy(state.api_url) for _ in poll(ANSWER_SECONDS)):
        say(f"Already up: {state.api_url.removesuffix('/api')}")
        renew_template(root, state.api_url)
    else:
        raise TrinityError(
            f"Prefect's server (process {running[0].pid}) does not answer at {state.api_url} in {ANSWER_SECONDS:g} s. "
            f"See {log_file('server', root)}; `trinity down` saves and ends the runs, and ends the server."
        )
    return state


def _without_supervisor(root: Path, state: UpState, say: Callable[[str], None]) -> UpState:
    """Stop the supervisor and return the record as it left it: it may have started another worker."""
    _stop(state.named("supervisor"), say)
    return UpState.load(root) or state


def _free_api_url(root: Path, port: int) -> str:
    """Return the API address for a new server. Raises TrinityError if the port is taken."""
    if not (root / "prefect.yaml").exists():
        raise TrinityError(f"There is no prefect.yaml in {root}: run `trinity up` in the folder of the deployments.")
    api_url = f"http://{LOOPBACK}:{port}/api"
    if is_healthy(api_url):
        raise TrinityError(f"Another Prefect server answers at {api_url}. Choose another port with --port.")
    if not port_is_free(port):
        raise TrinityError(f"Port {port} is in use. Choose another one with `trinity up --port N`.")
    return api_url


def _start_server(root: Path, port: int, state: UpState, say: Callable[[str], None]) -> None:
    say(f"Starting the Prefect server on port {port} …")
    start = _command("server", "start", "--host", LOOPBACK, "--port", str(port))
    env = server_environment(state.api_url, root) | migration_environment(root)
    server = start_process("server", start, env, root)
    state.add(Process.of("server", server.pid))
    wait_until_healthy(state.api_url, server, log_file("server", root))
    record_migration(root)
    write_settings(root, state.api_url)
    say("Creating the work pool and the deployments …")
    make_pool(root, state.api_url)
    _prefect(root, client_environment(state.api_url, root), "--no-prompt", "deploy", "--all")


def _start_missing(
    root: Path, state: UpState, pages: Sequence[Page], say: Callable[[str], None], since: datetime, restarts: int
) -> list[Page]:
    """Start the missing pages, worker and supervisor, save the record, and return the started pages.

    Runs are not affected. The supervisor restarts runs that crash after `since`.
    """
    served = [page for page in pages if not state.running(page.name) and start_page(root, page, state, say)]
    if not state.running("worker"):
        say("Starting the worker …")
        state.add(start_worker(root, state.api_url))
    if not state.running("supervisor"):
        say("Starting the supervisor …")
        ended = state.named("supervisor")
        since = datetime.fromtimestamp(ended[0].started, UTC) if ended else since
        state.add(start_supervisor(root, state.api_url, since, restarts))
    state.save(root)
    return served


def down(root: Path, say: Callable[[str], None]) -> bool:
    """Stop everything that `up` started here: the worker's runs (which save, as after a cancellation), the worker, and
    the server. Return False if nothing was running."""
    if not state_dir(root).is_dir():
        return _down(root, say)
    with _alone(root):
        return _down(root, say)


def _alone(root: Path) -> AbstractContextManager[None]:
    """Allow only one `up` or `down` at a time in a folder: with two servers on one port, one would answer for both."""
    return locked("up", root, UP_SECONDS)


def _down(root: Path, say: Callable[[str], None]) -> bool:
    state = UpState.load(root)
    if state is None:
        remove_settings(root)
        return False
    state = _without_supervisor(root, state, say)
    if state.running("server") and any(is_healthy(state.api_url) for _ in poll(BUSY_SECONDS)):
        _end_runs(root, state, say)
    _stop(state.processes, say)
    _remove_notes(root, state)
    UpState.forget(root)
    return True


def status(root: Path) -> list[str]:
    state = UpState.load(root)
    if state is None:
        return ["Nothing is running in this folder. Start it with `trinity up`."]
    health = "answers" if is_healthy(state.api_url) else "does not answer"
    lines = [f"{state.api_url.removesuffix('/api')} {health}"]
    lines += [
        f"{process.name:9} pid {process.pid} "
        + ("runs" if process.alive() else f"is gone; see {log_file(process.name, root)}")
        for process in state.processes
    ]
    lines += [f"{name:9} {url}" for name, url in state.pages.items()]
    return [*lines, f"key       {key_file(root)}", f"logs      {state_dir(root) / 'log'}"]


def write_settings(root: Path, api_url: str) -> None:
    """Write the server's address and key for `prefect` in this folder; a user's own file is never changed."""
    path = root / SETTINGS_FILE
    if path.exists() and not path.read_text().startswith(SETTINGS_NOTE):
        if _names_server(path, api_url, server_key(root)):
            return
        raise TrinityError(
            f'{path} was not written by `trinity up`: move it away, or put `url = "{api_url}"` and '
            f'`auth_string = "…"`, with the key in {key_file(root)}, below [api] in it.'
        )
    settings = f'{SETTINGS_NOTE}[api]\nurl = "{api_url}"\nauth_string = "{server_key(root)}"\n'
    write_atomically(path, settings.encode(), mode=0o600)


def _names_server(path: Path, api_url: str, key: str) -> bool:
    """True if the user's own Prefect settings lead to this server."""
    try:
        api = tomllib.loads(path.read_text()).get("api", {})
    except tomllib.TOMLDecodeError:
        return False
    return (api.get("url"), api.get("auth_string")) == (api_url, key)


def remove_settings(root: Path) -> None:
    path = root / SETTINGS_FILE
    if path.exists() and path.read_text().startswith(SETTINGS_NOTE):
        path.unlink()


def _remove_notes(root: Path, state: UpState) -> None:
    remove_settings(root)
    for note in state.notes:
        Path(note).unlink(missing_ok=True)


def _warn_of_another_server(state: UpState, say: Callable[[str], None]) -> None:
    """Warn if PREFECT_API_URL points elsewhere: it overrides the address in our `prefect.toml`, but not the key."""
    users = os.environ.get("PREFECT_API_URL", "")
    if users and not state.is_at(users):
        say(
            f"warning: `prefect` in this folder goes to PREFECT_API_URL={users}, not to {state.api_url}, and sends it "
            "this folder's key. First `unset PREFECT_API_URL`, or `export PREFECT_API_AUTH_STRING=` for that server."
        )


def _mark_left_runs(root: Path, api_url: str, say: Callable[[str], None], again: bool) -> None:
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


def _end_runs(root: Path, state: UpState, say: Callable[[str], None]) -> None:
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


def _stop(processes: list[Process], say: Callable[[str], None]) -> None:
    """Stop the processes. A worker waits for its runs, so the runs get SIGTERM too."""
    for process in reversed(processes):
        if process.alive():
            say(f"Stopping the {process.name} …")
            match process.name:
                case "worker":
                    process.terminate_children()
                    process.stop(END_SECONDS)
                case "supervisor" | "studio":
                    # Its children may be the worker, or runs started in the browser.
                    process.stop(15, with_children=False)
                case _:
                    process.stop(15)


def _prefect(root: Path, env: dict[str, str], *args: str) -> None:
    try:
        done = subprocess.run(
            _command(*args),
            env={**os.environ, **env, "PWD": str(root)},  # prefect.yaml reads it
            cwd=root,
            capture_output=True,
            text=True,
            timeout=PREFECT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TrinityError(f"`prefect {' '.join(args)}` has not ended within {PREFECT_SECONDS:g} s") from None
    if done.returncode:
        raise TrinityError(f"`prefect {' '.join(args)}` failed:\n{(done.stderr or done.stdout).strip()[-2000:]}")


def _command(*args: str) -> list[str]:
    return [sys.executable, "-m", "prefect", *args]
