"""Cancelling and retrying a run."""

from __future__ import annotations

import os
import signal
from enum import Enum

from studio.launch import start_process
from studio.prefect_runs import FlowRunSeen, PrefectRuns
from studio.runs import PREFECT_STATES, Run
from studio.settings import StudioSettings
from trinity_core.exchange.tracking.run_record import RunState, read_record


class Action(Enum):
    """A button on a run's page."""

    CANCEL = "Cancel"
    RETRY = "Retry"


def action_for(run: Run) -> Action | None:
    """Return what the state of a run calls for: to cancel it, or to retry one that has not finished."""
    if not run.state.is_over:
        return None if run.state is RunState.STOPPING else Action.CANCEL
    return None if run.state is RunState.FINISHED else Action.RETRY


def hindrance(action: Action, run: Run) -> str:
    """Return why an action is not possible, or ""."""
    if action is not action_for(run):
        return f"The run is {'over: ' if run.state.is_over else ''}{run.state.value}."
    if run.parent:
        return f"This is a stage of {run.parent}, which has the button."
    if run.is_part and not _deployed(run, action):
        return "Trainer and explorers were started one by one: stop or start each where it was started."
    if action is Action.CANCEL and not _deployed(run, action) and _own_process(run) is None:
        return "No process of this machine leads the run: press Ctrl+C in its terminal."
    if action is Action.RETRY and run.launch is None and not _deployed(run, action):
        return "The run's configuration was not recorded, or has secrets: run the command yourself."
    return ""


def perform(action: Action, run: Run, settings: StudioSettings) -> str:
    """Cancel or retry a run; return what happens next."""
    return _cancel(run, settings) if action is Action.CANCEL else _retry(run, settings)


def _cancel(run: Run, settings: StudioSettings) -> str:
    if deployed := _deployed(run, Action.CANCEL):
        runs = PrefectRuns(settings.api_url)
        begun = [seen for seen in deployed if runs.cancel(seen.id)]
        if not begun:
            return "The run will not begin."
    elif (pid := _own_process(run)) is not None:
        os.kill(pid, signal.SIGTERM)
    else:
        return "Its process has already ended."
    return "The run will save at its next step and stop."


def _retry(run: Run, settings: StudioSettings) -> str:
    for deployed in _deployed(run, Action.RETRY):
        PrefectRuns(settings.api_url).retry(deployed.id)
        return "A worker will start it again from its latest checkpoint."
    assert run.launch is not None
    return f"Started process {start_process(run.launch, run.name, settings).pid}."


def _deployed(run: Run, action: Action) -> list[FlowRunSeen]:
    """Return its flow runs on a worker that can be cancelled or retried.

    A run that is over is not cancelled, because a command may have resumed it. Parts with separate deployments are
    cancelled together, but not retried: a successful one would start again.
    """
    flow_runs = [seen for seen in run.flow_runs if run.is_part or seen is run.flow_run]
    if action is Action.RETRY:
        deployments = {seen.deployment for seen in flow_runs if seen.deployment}  # subflows have none
        return [seen for seen in flow_runs[:1] if deployments == {seen.deployment}]
    over = {kind for kind, state in PREFECT_STATES.items() if state.is_over}
    return [seen for seen in flow_runs if seen.deployment and seen.kind not in over]


def _own_process(run: Run) -> int | None:
    """Return the id of the run's main process if it is on this machine."""
    record = read_record(run.folder) if run.folder is not None else None
    return record.pid if record is not None and record.works_here else None
