"""Actions on a run: cancel, retry, evaluate, convert."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from enum import Enum
from pathlib import Path

from studio.launch import Launch, start_process
from studio.prefect_runs import FlowRunSeen, PrefectRuns
from studio.runs import PREFECT_STATES, Run, checkpoints_of
from studio.settings import StudioSettings
from studio.texts import escaped
from trinity_core.base.layout import JobLayout
from trinity_core.config.findings import value_at
from trinity_core.exchange.tracking.run_record import RunState, read_record


class Action(Enum):
    """A button on a run's page."""

    CANCEL = "Cancel"
    RETRY = "Retry"
    EVALUATE = "Evaluate"
    CONVERT = "Convert"


MISSING = "missing"
"""Evaluate the checkpoints that have no score."""


def hindrance(action: Action, run: Run) -> str:
    match action:
        case Action.CANCEL if run.state.is_over:
            return "The run is over."
        case Action.CANCEL if run.state is RunState.STOPPING:
            return "The run is already stopping."
        case Action.RETRY if not run.state.is_over:
            return "The run is not over."
        case Action.RETRY if run.state is RunState.FINISHED:
            return "The run has finished: there is nothing left to do."
        case Action.CANCEL | Action.RETRY if run.parent:
            return f"This is a stage of {run.parent}, which has the button."
        case Action.CANCEL | Action.RETRY if run.is_part and not _deployed(run, action):
            return "Trainer and explorers were started one by one: stop or start each where it was started."
        case Action.CANCEL if not _deployed(run, action) and _own_process(run) is None:
            return "No process of this machine leads the run: press Ctrl+C in its terminal."
        case Action.EVALUATE | Action.CONVERT if run.files.steps:
            return "Open one of the pipeline's stages."
        case Action.EVALUATE | Action.RETRY if run.launch is None and (
            action is Action.EVALUATE or not _deployed(run, action)
        ):
            return "The run's configuration was not recorded, or has secrets: run the command yourself."
        case Action.EVALUATE if value_at(run.files.config, "explorer.external_model"):
            return ""
        case Action.EVALUATE | Action.CONVERT if run.folder is None or not JobLayout(run.folder).steps():
            return "The run has no checkpoints."
        case Action.CONVERT if run.folder and _all_converted(run.folder):
            return "Every checkpoint is converted."
        case Action.EVALUATE if run.folder and run.files.scores.keys() >= {*JobLayout(run.folder).steps()}:
            return "Every checkpoint has a score. To score them on other eval sets, use `trinity evaluate`."
    return ""


def _all_converted(folder: Path) -> bool:
    checkpoints = checkpoints_of(folder)
    return bool(checkpoints) and all(checkpoint.is_converted for checkpoint in checkpoints)


def perform(action: Action, run: Run, settings: StudioSettings) -> str:
    match action:
        case Action.CANCEL:
            return _cancel(run, settings)
        case Action.RETRY:
            return _retry(run, settings)
    launch = side_launch(action, run)
    return begin(launch, run, settings)


def side_launch(action: Action, run: Run) -> Launch:
    """Return the flow that evaluates or converts the checkpoints of a run."""
    launch = run.launch or Launch("", "")
    if action is Action.EVALUATE:
        return replace(launch, flow="evaluate", which=MISSING)
    folder = str(run.folder) if run.folder is not None else ""
    return replace(launch, flow="convert", run="", checkpoint_dir=folder)


def begin(launch: Launch, run: Run, settings: StudioSettings) -> str:
    """Start a flow: as a run of its first deployment if it has one, else as a process on this machine."""
    deployments = PrefectRuns(settings.api_url).deployments(launch.flow) if settings.api_url and launch.config else {}
    for deployment in deployments:
        begun = PrefectRuns(settings.api_url).start(deployment, run.name, launch.parameters)
        return f"Started [{launch.flow} {escaped(run.name)}]({settings.flow_run_page(begun)})."
    return f"Started {launch.flow} {escaped(run.name)} as process {start_process(launch, run.name, settings).pid}."


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
