"""Passes a flow its configuration: from its file, or as a value from the command that has just loaded it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import Flow, State, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.local.worker import mark_ended
from tasks.frontend import PREFECT, PrefectFrontend, with_findings
from tasks.prefect_api import NOT_PROMOTED, REFUSED, with_main_settings
from tasks.reports import name_run
from tasks.retries import retry_only_transient_faults
from trinity_core.base.addresses import studio_page
from trinity_core.base.errors import TrinityError
from trinity_core.base.program import TERMINATED
from trinity_core.config import Config, load_config
from trinity_core.config.findings import ConfigError
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import run_request
from trinity_core.run.stage import StageRequest
from trinity_core.run.summary import summary_rows


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and its source."""

    config: Config
    file: str
    overrides: Sequence[str]
    is_ready: bool = False
    frontend: PrefectFrontend = PREFECT


_LOADED: ContextVar[Loaded | None] = ContextVar("_LOADED", default=None)


def load(file: str, overrides: Sequence[str], opened: bool = False) -> Loaded:
    """Load a flow's configuration, or take the value given to `run_flow` for this file and these overrides.

    `opened`: also open its models, data and folders, and report what is wrong with them by file and line. Raises
    TransientFault if all of it may resolve itself.
    """
    cached = _LOADED.get()
    if cached is not None and (cached.file, list(cached.overrides)) == (file, list(overrides)):
        return cached
    from trinity_core.run.preflight.checks import load_ready, refusal

    try:
        config = load_ready(file, overrides) if opened else load_checked(file, overrides)
    except ConfigError as error:
        first, *others = error.problems
        reason = f"{first.key}: {first.advice}" if first.key else str(first)
        name_run(f"{flow_run.name}{REFUSED}{reason}", f" (and {len(others)} more)" if others else "")
        raise refusal(error.problems) from None
    return Loaded(config, file, overrides, is_ready=opened)


def run_title() -> str:
    """Return the name with which a flow run begins: `project/name`, by its parameters, or the file's name if its
    configuration is wrong, which the run itself then reports."""
    parameters, cached = flow_run.parameters, _LOADED.get()
    file = parameters["config"] if "config" in parameters else parameters["configs"][0]
    request = {name: parameters[name] for name in ("stage", "which", "run") if name in parameters}
    try:
        settings = with_main_settings(parameters["overrides"], "", name=parameters.get("name"))
        config = load_config(file, settings) if cached is None else cached.config
        return StageRequest(config, flow_run.flow_name, **request).title
    except TrinityError:
        return Path(file).stem


def run_flow(name: str, loaded: Loaded, **parameters: Any) -> Any:
    """Run the flow `name` of `flows/` in this process with the `loaded` configuration; return its result.

    Prefect records the parameters of a deployment's run, so that `prefect flow-run retry` can start it again.
    """
    logging.getLogger("prefect.flow_runs").addFilter(_is_not_told_at_the_end)
    logging.getLogger("prefect.task_runs").addFilter(_is_no_signal)
    flow = cancellable(getattr(importlib.import_module(f"flows.{name}"), name))
    token = _LOADED.set(loaded)
    try:
        return flow(config=loaded.file, overrides=list(loaded.overrides), **parameters)
    finally:
        _LOADED.reset(token)


def _is_not_told_at_the_end(record: logging.LogRecord) -> bool:
    """Return False for an error that the command prints as its last line, and for a signal, of which that line
    tells."""
    is_printed = record.exc_info is not None and isinstance(record.exc_info[1], TrinityError)
    return not is_printed and _is_no_signal(record)


def _is_no_signal(record: logging.LogRecord) -> bool:
    """Return False for what Prefect logs when a signal ends a flow, which it takes for a crash."""
    text = record.getMessage()
    return not ("Crash" in text and _is_signal(sys.exc_info()[1])) and "record_cancellation" not in text


def _is_signal(error: object) -> bool:
    """True for Ctrl+C and SIGTERM; an exit of the user's code is none."""
    exits = isinstance(error, SystemExit) and error.code == TERMINATED
    return exits or isinstance(error, KeyboardInterrupt | TerminationSignal)


def cancellable(command: Flow[..., Any]) -> Flow[..., Any]:
    """Return a copy of the flow for a command that Ctrl+C or SIGTERM cancels; Prefect would record a crash."""

    def record_cancellation(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
        end = state.result(raise_on_failure=False)
        if _is_signal(end):
            signal = "Ctrl+C" if isinstance(end, KeyboardInterrupt) else "SIGTERM, such as that of Studio's Cancel"
            with get_client(sync_client=True) as client:
                mark_ended(client, [flow_run], "Cancelled", f"Cancelled by {signal}")

    return command.with_options(on_crashed=[record_cancellation])


def run_stage(
    kind: str, file: str, overrides: Sequence[str], stage: str, model_path: str = "", which: str = "", run: str = ""
) -> Any:
    """The body of the flows that run or evaluate one stage; returns its summary. Parameters are fields of
    `StageRequest`."""
    with retry_only_transient_faults():
        trains = kind in ("rft", "sft") and not (stage or model_path)
        loaded = load(file, overrides, opened=trains)
        request = StageRequest(loaded.config, kind, stage, model_path, which, run, loaded.is_ready)
        summary = run_request(request, loaded.frontend)
    log_results(loaded.config, summary)
    return ended(summary)


def log_results(config: Config, summary: dict[str, Any]) -> None:
    """Log a run's scores, the folder of its model and its page in Studio as one line, which
    `prefect deployment run --watch` prints; not in a command, which prints the summary itself."""
    if _LOADED.get() is None:
        rows, run = dict(summary_rows(summary)), f"{summary['project']}/{summary['name']}"
        results = [f"{title} {rows[title]}" for title in ("scores", "model") if title in rows]
        page = studio_page(config.job_dir.parent.parent, run)
        get_run_logger().info("%s", "; ".join([run, *results, f"Studio {page}"]))


def ended(summary: dict[str, Any]) -> Any:
    """Return a flow's summary, in a state that says what its gate has decided, what ended it early, or what the doctor
    has found in its run, if anything."""
    if (gate := summary.get("gate")) and gate["verdict"] != "promoted":
        return Completed(name=NOT_PROMOTED, message=f"{gate['verdict']}: {gate['candidate']}", data=summary)
    reason = summary.get("stopped_early") or ""
    if findings := summary.get("findings"):
        return with_findings(findings, summary, reason)
    return Completed(message=reason, data=summary) if reason else summary
