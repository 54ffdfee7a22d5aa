"""What may be done with a run, and the doing: cancel, retry, evaluate, convert."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from studio.prefect_runs import PrefectRuns
from studio.run_list import RunRow, RunState
from studio.settings import StudioSettings
from studio.started_processes import Launch, start_process


class Action(Enum):
    """A button below the list of runs."""

    CANCEL = "Cancel"
    RETRY = "Retry"
    EVALUATE = "Evaluate"
    CONVERT = "Convert"


PIPELINE = "pipeline"
"""The flow of several stages, whose checkpoints are theirs."""
MISSING = "missing"
"""Which checkpoints are evaluated: those without a score."""


def hindrance(action: Action, row: RunRow) -> str:
    """Why the action makes no sense for a run; empty if it does."""
    match action:
        case Action.CANCEL if row.state.is_over:
            return "It is over."
        case Action.CANCEL if row.state is RunState.ENDING:
            return "It ends already."
        case Action.RETRY if not row.state.is_over:
            return "It is not over."
        case Action.CANCEL | Action.RETRY if row.flow_run is not None and row.flow_run.parent:
            return "It is a stage: choose the run above it."
        case Action.CANCEL | Action.RETRY if _deployed(row) is None and row.process is None:
            return "It was started elsewhere: by a command, in whose terminal Ctrl+C ends it."
        case Action.EVALUATE | Action.CONVERT if row.flow == PIPELINE:
            return "It is a pipeline: choose one of its stages."
        case Action.EVALUATE if row.launch is None:
            return "The file that it was started with is not known."
        case Action.EVALUATE | Action.CONVERT if row.tracked is None:
            return "It has no checkpoints that MLflow knows of."
    return ""


def perform(action: Action, row: RunRow, settings: StudioSettings) -> str:
    """Do it, and say what was done. Raises what Prefect's API raises, OSError."""
    match action:
        case Action.CANCEL:
            return _cancel(row, settings)
        case Action.RETRY:
            return _retry(row, settings)
    launch = side_launch(action, row)
    return begin(launch, row, settings)


def side_launch(action: Action, row: RunRow) -> Launch:
    """The flow that evaluates or converts the checkpoints of a run."""
    given = row.launch or Launch("", "")
    if action is Action.EVALUATE:
        return replace(given, flow="evaluate", which=MISSING)
    folder = str(row.tracked.job_dir) if row.tracked is not None else ""
    return replace(given, flow="convert", checkpoint_dir=folder)


def begin(launch: Launch, row: RunRow, settings: StudioSettings) -> str:
    """Start a flow: as a run of its first deployment if it has one, else as a process on this machine."""
    found = PrefectRuns(settings.api_url).deployments(launch.flow) if settings.api_url and launch.config else {}
    for deployment, name in found.items():
        PrefectRuns(settings.api_url).start(deployment, row.title, launch.parameters)
        return f"Started {name}."
    project, name = _names(row)
    return f"Started process {start_process(launch, project, name, settings).pid}."


def _cancel(row: RunRow, settings: StudioSettings) -> str:
    if row.process is not None:
        row.process.cancel()
    elif row.flow_run is not None:
        PrefectRuns(settings.api_url).cancel(row.flow_run.id, row.state is not RunState.WAITING)
    return "It will not begin." if row.state is RunState.WAITING else "It saves at its next step boundary, and ends."


def _retry(row: RunRow, settings: StudioSettings) -> str:
    if deployed := _deployed(row):
        PrefectRuns(settings.api_url).retry(deployed)
        return "A worker starts it again; it resumes from its latest checkpoint."
    assert row.process is not None
    return f"Started process {start_process(row.process.launch, *_names(row), settings).pid}."


def _deployed(row: RunRow) -> str | None:
    """The id of its flow run, if a worker runs that."""
    return row.flow_run.id if row.flow_run is not None and row.flow_run.deployment else None


def _names(row: RunRow) -> tuple[str, str]:
    if row.tracked is not None:
        return row.tracked.project, row.tracked.name
    if row.process is not None:
        return row.process.project, row.process.name
    project, _, name = row.title.partition("/")
    return project, name
