"""Runs flows in this process against the server of `trinity up` or a temporary one."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from types import TracebackType
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from flows.local.server import TemporaryServer, UpState, client_environment, is_healthy, prefect_environment
from trinity_core.base.errors import TrinityError
from trinity_core.base.gate import server_key
from trinity_core.base.processes import require_limits
from trinity_core.base.program import TERMINATED, ending_on_sigterm
from trinity_core.config import Config, stages
from trinity_core.config.secrets import without_password
from trinity_core.exchange.tracking.pauses import Decision
from trinity_core.run.verdicts import asks_person

ANSWER_SECONDS = 10.0
"""Time limit for the server of PREFECT_API_URL, which may be remote."""
GIVEN_UP_AFTER = "2"
"""Retries of a request to a temporary server (6 s in all): once ended, it does not come back."""
ASKING = ("pipeline", "sft", "gate")
"""Flows that may ask a person."""
RESUMED = ("pipeline", "rft", "sft")
"""Flows whose runs can be resumed if they train."""
WITHOUT_RAY = ("curate",)
"""Flows that usually need no Ray, and start it themselves if they do."""


class ServerLost(TrinityError):
    """The server died before the flow ended, so Prefect cannot send its remaining events."""


class PrefectConnection:
    """A context that makes Prefect's API available to the flows of this process.

    The API is the first available of PREFECT_API_URL, the server of `trinity up`, and a temporary server. The temporary
    server starts in the background, so that work before the first flow costs no extra time.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path.cwd()
        self._temporary: TemporaryServer | None = None
        self._open = ExitStack()
        self._runs: list[Config] = []

    def __enter__(self) -> PrefectConnection:
        require_limits()
        self._open.enter_context(ending_on_sigterm())
        os.environ.update(prefect_environment(self._root))
        server = known_server(self._root)
        if not server:
            self._temporary = TemporaryServer(self._root)
            os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", GIVEN_UP_AFTER)
            self._open.callback(self._temporary.stop)
            self._open.callback(_send_logs)
            server = client_environment(self._temporary.api_url, self._root)
        os.environ.update(server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        server_is_gone = self._temporary is not None and self._temporary.has_ended()
        handled = self._open.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == TERMINATED):
            for config in self._runs:
                print(ended_by_signal(config), file=sys.stderr)
        if error is not None and _is_api_fault(error) and (lost := self._lost(server_is_gone)):
            raise ServerLost(f"{lost}. What the run saved is kept: run the same command again to resume.") from error
        return handled

    def _lost(self, server_is_gone: bool) -> str:
        """Describe how Prefect's API was lost; "" if it answers."""
        if self._temporary:
            return f"The Prefect server of this command has ended; see {self._temporary.log}" if server_is_gone else ""
        api_url = os.environ["PREFECT_API_URL"]
        return "" if is_healthy(api_url) else f"The Prefect server at {without_password(api_url)} no longer answers"

    def run(
        self,
        name: str,
        config: Config,
        file: Path,
        overrides: Sequence[str],
        is_ready: bool = False,
        decision: Decision | None = None,
        **parameters: Any,
    ) -> Any:
        """Run the flow of that name once Prefect's API answers; return its result.

        The flow gets the configuration as loaded from `file` with `overrides`. `is_ready`: preflight has just passed.
        `decision`: at the pause at which the run waits. Ray starts meanwhile if the flow is certain to need it, and
        ends with this context. Raises TrinityError if the flow would ask a person before it trains, and the server has
        no page to answer on.
        """
        from flows.loaded import Loaded, run_flow
        from tasks.frontend import PrefectFrontend
        from tasks.retries import show_our_log
        from trinity_core.run.driver import early_cluster

        show_our_log()
        _outlive_readers()
        if self._temporary:
            logging.getLogger("prefect.flow_runs").addFilter(_names_no_page)
            if name in ASKING:
                require_nobody_asked(config)
            if name not in WITHOUT_RAY:
                self._open.enter_context(early_cluster(config))
            print("Starting Prefect …", file=sys.stderr)
            self._temporary.wait()
        frontend = PrefectFrontend(self._temporary is None, decision)
        loaded = Loaded(config, str(file), overrides, is_ready, frontend)
        if name in RESUMED and config.mode in ("both", "train"):
            self._runs.append(config)
        return run_flow(name, loaded, **parameters)


def ended_by_signal(config: Config) -> str:
    """Describe what remains of a run that a signal ended, and how to resume it."""
    from trinity_core.exchange.checkpoints.resume import (
        whole_steps,  # latest_whole reads all contents, which takes minutes
    )
    from trinity_core.exchange.tracking.run_record import read_record
    from trinity_core.run.stage import in_newest_folder

    run, next_start = config, "The same command resumes the run."
    if not config.continue_from_checkpoint:
        run, next_start = in_newest_folder(config), "The same command starts over."
        record = read_record(run.job_dir)
        if record is None or record.pid != os.getpid():
            return f"Ended by a signal before the run had begun. {next_start}"
        next_start += f" With `name={run.name} continue_from_checkpoint=true` at its end it resumes this run."
    saved = {stage.name: whole_steps(stage.job_dir) for stage in stages(run)}
    checkpoints = ", ".join(f"step {max(steps)} of {name}" for name, steps in saved.items() if steps) or "no step yet"
    return f"Ended by a signal. Saved: {checkpoints}. {next_start}"


def _outlive_readers() -> None:
    """If nobody reads our output pipe any more (`| head`), drop the output; rich would end the run."""
    from rich.console import Console

    def go_on(self: Console) -> None:
        pipe, nowhere = os.fstat(self.file.fileno()), os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if os.path.samestat(os.fstat(stream), pipe):
                os.dup2(nowhere, stream)

    Console.on_broken_pipe = go_on  # type: ignore[method-assign]


def _names_no_page(record: logging.LogRecord) -> bool:
    """Return False for Prefect's lines "View at …": a temporary server is gone when a user follows the link."""
    return not record.getMessage().startswith("View at ")


def require_nobody_asked(config: Config) -> None:
    gates = (stage.name for stage in stages(config) if stage.gate.needs_approval)
    if asking := [*(stage.name for stage in stages(config) if asks_person(stage)), *gates]:
        raise TrinityError(
            f"{asking[0]} asks a person (human_verdicts, gate.needs_approval) on Prefect's page, which this command "
            "does not serve: run "
            "`trinity up` in this folder first."
        )


def known_server(root: Path) -> dict[str, str]:
    """Return the variables for Prefect's API: that of PREFECT_API_URL, else that of `trinity up` here, else none.

    Raises TrinityError if no server answers at PREFECT_API_URL.
    """
    api_url, ours = os.environ.get("PREFECT_API_URL"), UpState.load(root)
    if not api_url:
        return client_environment(ours.api_url, root) if ours and is_healthy(ours.api_url) else {}
    try:
        urlopen(f"{api_url}/health", timeout=ANSWER_SECONDS).close()  # noqa: S310 (the user's own address)
    except HTTPError:
        pass  # It answers; Prefect itself checks the key and the certificate.
    except (OSError, ValueError, HTTPException) as error:
        if not isinstance(getattr(error, "reason", None), SSLError):
            raise TrinityError(
                f"No Prefect server answers at PREFECT_API_URL={without_password(api_url)} ({error}). Start it, or "
                "correct the variable, or unset it: then the server of `trinity up`, or a temporary one, is used."
            ) from None
    if ours is None:
        return {"PREFECT_API_URL": api_url}
    # Prefect would send the key in our `prefect.toml` to any server.
    key = server_key(root) if ours.is_at(api_url) else os.environ.get("PREFECT_API_AUTH_STRING", "")
    return {"PREFECT_API_URL": api_url, "PREFECT_API_AUTH_STRING": key}


def _is_api_fault(error: BaseException) -> bool:
    return "prefect" in sys.modules and isinstance(error, importlib.import_module("tasks.retries").api_faults())


def _send_logs() -> None:
    """Flush Prefect's log now: at exit it would try for a minute to reach a server that is gone."""
    if "prefect" in sys.modules:
        importlib.import_module("prefect.logging.handlers").APILogHandler().flush()
