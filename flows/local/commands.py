"""`trinity up`, `down`, `status`: Prefect server, work pool, one worker, all deployments and pages, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from flows.local.keeper import start_keeper
from flows.local.pages import Page, port_is_free, start_page, wait_for_page
from flows.local.restarts import RESTARTS
from flows.local.runs import (
    END_SECONDS,
    cancel_runs,
    mark_crashed,
    pause_pool,
    pool_is_shared,
    process_is_gone,
    run_process,
    unfinished_runs,
)
from flows.local.server import (
    Process,
    UpState,
    is_healthy,
    prefect_environment,
    start_process,
    state_dir,
    wait_until_healthy,
)
from flows.local.work_pool import POOL, start_worker, worker_name
from tasks.prefect_api import api_client
from tasks.retries import api_faults
from trinity_core.addresses import LOOPBACK
from trinity_core.errors import TrinityError

SETTINGS_FILE = "prefect.toml"
SETTINGS_NOTE = (
    "# Written by `trinity up`, so that `prefect` finds the server in this folder; `trinity down` removes it.\n"
)

PREFECT_SECONDS = 300.0
"""For one command of Prefect, such as the deployment of all flows."""


def up(
    root: Path, port: int, say: Callable[[str], None], restarts: int = RESTARTS, pages: Sequence[Page] = ()
) -> UpState:
    """Start what is not running yet. If a step fails, everything that was started is stopped again.

    A run that is killed is started again, at most `restarts` times an hour. A page that cannot be served is said; the
    rest goes on without it.
    """
    running = UpState.load(root)
    began = datetime.now(UTC)
    if running and is_healthy(running.api_url) and all(server.alive() for server in running.named("server")):
        running = _complete(root, running, restarts, pages, say)
        _warn_of_another_server(running.api_url, say)
        return running
    if running:
        down(root, say)
    if not (root / "prefect.yaml").exists():
        raise TrinityError(f"There is no prefect.yaml in {root}: run `trinity up` in the folder of the deployments.")
    api_url = f"http://{LOOPBACK}:{port}/api"
    if is_healthy(api_url):
        raise TrinityError(f"Another Prefect server answers at {api_url}. Choose another port with --port.")
    if not port_is_free(port):
        raise TrinityError(f"Port {port} is used already. Choose another one with `trinity up --port N`.")
    env = prefect_environment(root) | {"PREFECT_API_URL": api_url}
    started: list[Process] = []
    state = UpState(api_url, started)
    try:
        say(f"Starting the Prefect server on port {port} …")
        _start_server(root, port, api_url, env, started)
        write_settings(root, api_url)
        served = [process for page in pages if (process := _start_page(root, state, page, say))]
        say("Making the work pool and the deployments …")
        _prefect(root, env, "work-pool", "create", POOL, "--type", "process", "--overwrite")
        _prefect(root, env, "--no-prompt", "deploy", "--all")
        # What a power cut has killed is started again; what `down` has ended is not.
        _mark_left_runs(root, api_url, say, again=bool(running and restarts))
        since = began if running else datetime.now(UTC)
        started.append(start_worker(root, api_url))
        started.append(start_keeper(root, api_url, since, restarts))
        state.save(root)
    except BaseException:
        _stop(started, say)
        remove_settings(root)
        _remove_notes(state)
        raise
    _wait_for_pages(root, pages, served, say)
    _warn_of_another_server(api_url, say)
    return state


def down(root: Path, say: Callable[[str], None]) -> bool:
    """Stop exactly what `up` has started here: the worker's runs, which save as on a cancellation, the worker, and then
    the server."""
    state = UpState.load(root)
    remove_settings(root)
    if state is None:
        return False
    _stop(state.named("keeper"), say)
    state = UpState.load(root) or state  # the keeper may have put another worker there
    if any(process.alive() for process in state.named("server")) and is_healthy(state.api_url):
        _end_runs(root, state, say)
    _stop(state.processes, say)
    _remove_notes(state)
    UpState.forget(root)
    return True


def status(root: Path) -> list[str]:
    """One line for each thing that is, or should be, running."""
    state = UpState.load(root)
    if state is None:
        return ["Nothing is up in this folder. Start it with `trinity up`."]
    health = "answers" if is_healthy(state.api_url) else "does not answer"
    lines = [f"{state.api_url.removesuffix('/api')} {health}"]
    lines += [f"{each.name:9} pid {each.pid} {'runs' if each.alive() else 'is gone'}" for each in state.processes]
    lines += [f"{name:9} {url}" for name, url in state.pages.items()]
    return [*lines, f"logs      {state_dir(root) / 'log'}"]


def write_settings(root: Path, api_url: str) -> None:
    """Tell the `prefect` command in this folder where the server is; a file of the user's own is left alone."""
    path = root / SETTINGS_FILE
    if path.exists() and not path.read_text().startswith(SETTINGS_NOTE):
        raise TrinityError(f'{path} is your own: put `url = "{api_url}"` below [api] in it, or move it away.')
    path.write_text(f'{SETTINGS_NOTE}[api]\nurl = "{api_url}"\n')


def remove_settings(root: Path) -> None:
    """Remove the file again if it is ours."""
    path = root / SETTINGS_FILE
    if path.exists() and path.read_text().startswith(SETTINGS_NOTE):
        path.unlink()


def _start_server(root: Path, port: int, api_url: str, env: dict[str, str], started: list[Process]) -> None:
    command = _command("server", "start", "--host", LOOPBACK, "--port", str(port))
    server = start_process("server", command, env, root)
    started.append(Process.of("server", server.pid))
    wait_until_healthy(api_url, server, state_dir(root) / "log" / "server.log")


def _complete(
    root: Path, running: UpState, restarts: int, pages: Sequence[Page], say: Callable[[str], None]
) -> UpState:
    """With the server up, start what has ended beside it, and pages that are not served. The runs go on meanwhile."""
    gone = [process for process in running.processes if not process.alive() and process.name in ("worker", "keeper")]
    for process in gone:
        say(f"Starting the {process.name} again, which has ended …")
        if process.name == "worker":
            again = start_worker(root, running.api_url)
        else:
            again = start_keeper(root, running.api_url, datetime.fromtimestamp(process.started, UTC), restarts)
        running = running.replace(again)
        running.save(root)
    missing = [page for page in pages if not any(process.alive() for process in running.named(page.name))]
    served = [started for page in missing if (started := _start_page(root, running, page, say))]
    if served:
        running.save(root)
        _wait_for_pages(root, pages, served, say)
    if not gone and not served:
        say(f"Already up: {running.api_url.removesuffix('/api')}")
    return running


def _start_page(root: Path, state: UpState, page: Page, say: Callable[[str], None]) -> Process | None:
    """Start a page and note it in `state`, which is not saved here; None if it cannot be served."""
    process = start_page(root, page, state.api_url, say)
    if process is not None:
        state.processes[:] = [*(each for each in state.processes if each.name != page.name), process]
        state.pages[page.name] = page.url
        state.notes[:] = sorted({*state.notes, *map(str, page.notes)})
    return process


def _wait_for_pages(root: Path, pages: Sequence[Page], served: Sequence[Process], say: Callable[[str], None]) -> None:
    by_name = {page.name: page for page in pages}
    for process in served:
        wait_for_page(root, by_name[process.name], process, say)


def _remove_notes(state: UpState) -> None:
    for note in state.notes:
        Path(note).unlink(missing_ok=True)


def _warn_of_another_server(api_url: str, say: Callable[[str], None]) -> None:
    """The environment goes before our `prefect.toml`."""
    given = os.environ.get("PREFECT_API_URL", "")
    if given and given.rstrip("/").replace("//localhost:", f"//{LOOPBACK}:") != api_url:
        say(f"warning: `prefect` goes to PREFECT_API_URL={given}, not to {api_url}. First `unset PREFECT_API_URL`.")


def _mark_left_runs(root: Path, api_url: str, say: Callable[[str], None], again: bool) -> None:
    """Before there is a worker: what counts as running was killed, with the worker or the machine, unless it lives on.

    With `again` the keeper starts again what had begun, and the user need not do it.
    """
    with api_client(api_url) as client:
        if pool_is_shared(client, POOL, worker_name(root)):
            return
        runs = unfinished_runs(client, POOL)
        left = [run for run in runs if not run.infrastructure_pid or run_process(run) is None or process_is_gone(run)]
        mark_crashed(client, left, "Killed before `trinity up` started Prefect again")
        for run in left:
            begun = again and run.state is not None and run.state.is_running()
            resumes = "It is started again and" if begun else f"`prefect flow-run retry {run.id}`"
            say(f"The run {run.name} was killed. {resumes} resumes from its checkpoint.")
        for run in runs:
            if run not in left:
                say(f"The run {run.name} has gone on without Prefect's server.")


def _end_runs(root: Path, state: UpState, say: Callable[[str], None]) -> None:
    """Cancel what the worker runs, and end the worker before it can take more.

    If another folder's worker may own some of the runs, nothing is done here: `_stop` sends our own ones SIGTERM.
    """
    worker = state.named("worker")
    try:
        with api_client(state.api_url) as client:
            if pool_is_shared(client, POOL, worker_name(root)):
                return
            with pause_pool(client, POOL):
                cancel_runs(client, POOL, say, [process.pid for process in worker if process.alive()])
                _stop(worker, say)
                mark_crashed(client, unfinished_runs(client, POOL), "Its worker ended before it did")
    except api_faults() as error:
        say(f"Prefect does not end the runs, so they get SIGTERM: {error}")


def _stop(processes: list[Process], say: Callable[[str], None]) -> None:
    """A worker waits for its runs: those that it still has get SIGTERM too."""
    for process in reversed(processes):
        if process.alive():
            say(f"Stopping the {process.name} …")
            match process.name:
                case "worker":
                    process.terminate_children()
                    process.stop(grace=END_SECONDS)
                case "keeper" | "studio":  # the worker, or runs that were started in the browser, may be its children
                    process.stop_alone(grace=15)
                case _:
                    process.stop(grace=15)


def _prefect(root: Path, env: dict[str, str], *args: str) -> None:
    try:
        done = subprocess.run(
            _command(*args),
            env={**os.environ, **env},
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
