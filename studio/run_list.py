"""The list of runs: Prefect's flow runs, MLflow's runs that no flow run stands for, and Studio's own processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum

from studio.prefect_runs import FlowRunSeen
from studio.started_processes import Launch, StartedProcess
from studio.tracked_runs import TrackedRun


class RunState(Enum):
    """What becomes of a run, in the words of the page."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    KILLED = "killed"
    ENDED = "ended"
    """How is not known."""

    @property
    def is_over(self) -> bool:
        """True if nothing works on it any more."""
        return self not in (RunState.WAITING, RunState.RUNNING, RunState.ENDING)


PREFECT_STATES = {
    "SCHEDULED": RunState.WAITING,
    "PENDING": RunState.WAITING,
    "PAUSED": RunState.WAITING,
    "RUNNING": RunState.RUNNING,
    "CANCELLING": RunState.ENDING,
    "COMPLETED": RunState.DONE,
    "FAILED": RunState.FAILED,
    "CANCELLED": RunState.CANCELLED,
    "CRASHED": RunState.KILLED,
}
MLFLOW_STATES = {
    "SCHEDULED": RunState.WAITING,
    "RUNNING": RunState.RUNNING,
    "FINISHED": RunState.DONE,
    "FAILED": RunState.FAILED,
    "KILLED": RunState.CANCELLED,
}
SIDE_FLOWS = ("evaluate", "convert")
"""Flows that work on the checkpoints of a run that another one has trained."""


def box_of(key: str) -> str:
    """The name under which Streamlit keeps whether the row of that key is chosen."""
    return f"chosen run {key}"


@dataclass(frozen=True, slots=True)
class RunRow:
    """A line of the list."""

    key: str
    """Tells it from all others, also at the next look."""
    title: str
    state: RunState
    detail: str = ""
    """Why it is in this state, if that is known."""
    flow: str = ""
    began: datetime | None = None
    ended: datetime | None = None
    depth: int = 0
    """1 for a stage of the run above it."""
    flow_run: FlowRunSeen | None = None
    tracked: TrackedRun | None = None
    process: StartedProcess | None = None

    @property
    def launch(self) -> Launch | None:
        """How it was started; None if that is not known."""
        if self.process is not None:
            return self.process.launch
        given = self.flow_run.parameters if self.flow_run is not None else {}
        if not given.get("config") or not isinstance(given["config"], str):
            return None
        stage = str(given.get("stage") or "")
        return Launch(self.flow, given["config"], tuple(given.get("overrides") or ()), stage)

    def seconds(self, now: datetime) -> float | None:
        """How long it has taken so far; None if it has not begun."""
        return None if self.began is None else max(((self.ended or now) - self.began).total_seconds(), 0.0)


def run_rows(
    flow_runs: Sequence[FlowRunSeen], tracked: Sequence[TrackedRun], processes: Sequence[StartedProcess]
) -> list[RunRow]:
    """All runs, the newest first, each followed by its stages."""
    by_name = {(run.project, run.name): run for run in reversed(tracked)}
    started = {run.id: process for process, run in _started(flow_runs, processes)}
    alone = [each for each in processes if each not in started.values()]
    trains = {(each.project, each.name): each for each in reversed(alone) if each.launch.flow not in SIDE_FLOWS}
    rows = [_of_flow_run(run, by_name, started.get(run.id)) for run in flow_runs]
    known = {(row.tracked.project, row.tracked.name) for row in rows if row.tracked}
    rows += [
        _of_tracked(run, trains.get((run.project, run.name))) for run in tracked if (run.project, run.name) not in known
    ]
    shown = {row.process for row in rows}
    rows += [_of_process(each) for each in alone if each not in shown and (each.project, each.name) not in known]
    return list(_nested(rows))


def _started(
    flow_runs: Sequence[FlowRunSeen], processes: Sequence[StartedProcess]
) -> Iterator[tuple[StartedProcess, FlowRunSeen]]:
    """Each process with its flow run: the first of its name, without a deployment, that began after it."""
    free = sorted((run for run in flow_runs if run.began and not run.deployment and not run.parent), key=_began)
    for process in sorted(processes, key=lambda each: each.started):
        for run in free:
            same = (run.tags.get("project"), run.tags.get("name")) == (process.project, process.name)
            if same and _began(run).timestamp() >= process.started:
                free.remove(run)
                yield process, run
                break


def _began(run: FlowRunSeen) -> datetime:
    return run.began or datetime.max.replace(tzinfo=UTC)


def _of_flow_run(
    run: FlowRunSeen, by_name: dict[tuple[str, str], TrackedRun], process: StartedProcess | None
) -> RunRow:
    named = (run.tags.get("project", ""), run.tags.get("name", ""))
    return RunRow(
        key=run.id,
        title=run.title,
        state=PREFECT_STATES.get(run.kind, RunState.WAITING),
        detail=run.message,
        flow=run.flow,
        began=run.began,
        ended=run.ended,
        depth=1 if run.parent else 0,
        flow_run=run,
        tracked=by_name.get(named),
        process=process,
    )


def _of_tracked(run: TrackedRun, process: StartedProcess | None) -> RunRow:
    state = MLFLOW_STATES.get(run.status, RunState.RUNNING)
    if process is not None and state.is_over == process.alive():
        state = RunState.RUNNING if process.alive() else RunState.KILLED
    return RunRow(
        key=run.id,
        title=f"{run.project}/{run.name}",
        state=state,
        flow=process.launch.flow if process is not None else "",
        began=run.began,
        ended=run.ended if state.is_over else None,
        depth=1 if run.parent else 0,
        tracked=run,
        process=process,
    )


def _of_process(process: StartedProcess) -> RunRow:
    alive = process.alive()
    return RunRow(
        key=process.log,
        title=f"{process.project}/{process.name}",
        state=RunState.RUNNING if alive else RunState.ENDED,
        detail="" if alive else process.last_line(),
        flow=process.launch.flow,
        began=datetime.fromtimestamp(process.started, UTC),
        process=process,
    )


def _nested(rows: Sequence[RunRow]) -> Iterator[RunRow]:
    """Runs by the time of their beginning, those that have not begun first; below each its parts, in order."""
    parents = {row.key for row in rows}
    parts: dict[str, list[RunRow]] = {}
    tops = []
    for row in rows:
        parent = _parent(row)
        if parent in parents:
            parts.setdefault(parent, []).append(row)
        else:
            tops.append(replace(row, depth=0))
    for row in sorted(tops, key=lambda row: row.began or datetime.max.replace(tzinfo=UTC), reverse=True):
        yield row
        yield from sorted(parts.get(row.key, []), key=lambda part: part.began or datetime.max.replace(tzinfo=UTC))


def _parent(row: RunRow) -> str:
    if row.flow_run is not None:
        return row.flow_run.parent
    return row.tracked.parent if row.tracked is not None else ""
