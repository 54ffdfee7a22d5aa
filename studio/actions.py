"""Cancelling and retrying a run."""

from __future__ import annotations

import os
import signal
from typing import Literal

from studio.launch import start_run
from studio.prefect_runs import FlowRunSeen, cancel_run, retry_run
from studio.runs import PREFECT_STATES, Run
from studio.settings import StudioSettings
from trinity_core.exchange.tracking.run_record import RunState


def action_for(run: Run) -> Literal["Cancel", "Retry", ""]:
    """Return what the state of a run calls for: to cancel it, or to retry one that has not finished."""
    if run.state in (RunState.STARTING, RunState.STOPPING, RunState.FINISHED):
        return ""
    return "Retry" if run.state.is_over else "Cancel"


def hindrance(run: Run) -> str:
    """Return why `action_for` the run is not possible, or ""."""
    if run.parent:
        return f"This is a stage of {run.parent}, which has the button."
    if _deployed(run):
        return ""
    if run.is_part:
        return "Trainer and explorers were started one by one: stop or start each where it was started."
    if run.state.is_over and run.launch is None:
        return "The run's configuration was not recorded, or has secrets: run the command yourself."
    if not run.state.is_over and not (run.record and run.record.works_here):
        return "No process of this machine leads the run: press Ctrl+C in its terminal."
    return ""


def perform(run: Run, settings: StudioSettings) -> str:
    """Cancel a run, or retry one that is over; return what happens next."""
    deployed, record = _deployed(run), run.record
    if run.state.is_over and deployed:
        retry_run(settings.api_url, deployed[0].id)
        return "A worker will start it again from its latest checkpoint."
    if run.state.is_over:
        assert run.launch is not None
        start_run(run.launch, run.name, run.folder or settings.checkpoints / run.name, settings)
        return "It continues from its latest checkpoint."
    if deployed and not [seen for seen in deployed if cancel_run(settings.api_url, seen.id)]:
        return "The run will not begin."
    if not deployed:
        if record is None or not record.works_here:
            return "Its process has already ended."
        os.kill(record.pid, signal.SIGTERM)
    return "The run will save at its next step and stop."


def _deployed(run: Run) -> list[FlowRunSeen]:
    """Return its flow runs on a worker that can be cancelled or, if the run is over, retried. A run that is over is not
    cancelled, because a command may have resumed it. Parts with separate deployments are cancelled together, but not
    retried: a successful one would start again."""
    flow_runs = [seen for seen in run.flow_runs if run.is_part or seen is run.flow_run]
    if run.state.is_over:
        deployments = {seen.deployment for seen in flow_runs if seen.deployment}  # subflows have none
        return [seen for seen in flow_runs[:1] if deployments == {seen.deployment}]
    over = {kind for kind, state in PREFECT_STATES.items() if state.is_over}
    return [seen for seen in flow_runs if seen.deployment and seen.kind not in over]
