"""All runs: the folders below the checkpoints, with their flow runs in Prefect; their checkpoints and ancestors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from studio.curves import Curves, Point, one_after_another
from studio.launch import Launch, is_starting
from studio.prefect_runs import FlowRunSeen, recent_runs
from studio.settings import StudioSettings
from tasks.prefect_api import MAIN_SETTINGS, REFUSED, with_main_settings
from tasks.retries import api_faults
from trinity_core.base.files import read_json
from trinity_core.base.layout import JobLayout, label_of, run_of, stages_of
from trinity_core.config.algorithm_types import ALGORITHMS
from trinity_core.config.findings import value_at
from trinity_core.config.secrets import MASK, without_secrets
from trinity_core.config.yaml_text import parse_value
from trinity_core.exchange.checkpoints.resume import CLAIM, whole_steps
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsReader, metrics_path
from trinity_core.exchange.tracking.notes import Note
from trinity_core.exchange.tracking.progress import seconds_a_step, steps_text
from trinity_core.exchange.tracking.run_record import (
    RunRecord,
    RunState,
    config_path,
    known_config,
    read_record,
    record_path,
)
from trinity_core.exchange.tracking.scores import intervals_like_the_newest, score_text, scores_like_the_newest
from trinity_core.exchange.tracking.writers import full_names
from trinity_core.results.lineage import Ancestor, ancestry, next_stage, parent_of

PREFECT_STATES = {
    "SCHEDULED": RunState.WAITING, "PENDING": RunState.WAITING, "PAUSED": RunState.WAITING,
    "RUNNING": RunState.RUNNING, "CANCELLING": RunState.STOPPING, "COMPLETED": RunState.FINISHED,
    "FAILED": RunState.FAILED, "CANCELLED": RunState.CANCELLED, "CRASHED": RunState.KILLED,
}  # fmt: skip
SIDE_FLOWS = ("evaluate", "convert", "curate")
"""Flows that may run at the same time as a run's training."""
QUOTED = re.compile(r'"([A-Za-z][\w.-]*)"')


@dataclass(frozen=True, slots=True)
class Run:
    """A run, in progress or over."""

    name: str
    """`project/name`; until Prefect knows that, the flow run's name, with `(flow FILE overrides)`."""
    state: RunState
    folder: Path | None = None
    detail: str = ""
    parent: str = ""
    flow_runs: tuple[FlowRunSeen, ...] = ()
    """Flow runs of this name, the one that represents the run first."""
    config: Mapping[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of the scores, unless they are means of several sets."""
    note: Note = field(default_factory=Note)
    algorithm: str = ""
    model: str = ""
    source: tuple[str, int] = ("", 0)
    """`project/name` and step of the checkpoint that the run began with, if it is one."""
    record: RunRecord | None = None
    stages: Mapping[str, str] = field(default_factory=dict)
    """Stage of a pipeline → `project/name` of its run."""
    step: int = 0
    total_steps: int | None = None
    """Configured number of steps; if epochs or the data determine it, known after the first."""
    seconds_a_step: float | None = None
    part: Run | None = None
    """The stage of a pipeline that is in progress, else the last one that has trained."""

    @property
    def score(self) -> float | None:
        return self.scores[max(self.scores)] if self.scores else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.intervals.get(max(self.scores, default=-1))

    @property
    def score_text(self) -> str:
        """`0.985 [0.968, 0.993]`."""
        return "–" if self.score is None else score_text(self.score, self.interval)

    @property
    def progress(self) -> str:
        """`8 of 8`; in progress `4 of 8, 35 s left`; of a pipeline `sft 4 of 8, …`; "" if unknown or without a step."""
        if part := self.part:
            return f"{next(stage for stage, name in self.stages.items() if name == part.name)} {part.progress}".strip()
        seconds = None if self.state.is_over else self.seconds_left
        may_begin = self.total_steps and not self.state.is_over and not self.stages
        return steps_text(self.step, self.total_steps, seconds) if self.step or may_begin else ""

    @property
    def method(self) -> str:
        """Its algorithm, or the stages of a pipeline."""
        return " → ".join(self.stages) or self.algorithm

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the pace of the latest steps, if known."""
        if self.seconds_a_step is None or self.total_steps is None:
            return None
        return max(self.total_steps - self.step, 0) * self.seconds_a_step

    @property
    def flow_run(self) -> FlowRunSeen | None:
        return self.flow_runs[0] if self.flow_runs else None

    @property
    def began(self) -> datetime | None:
        if self.record:
            return datetime.fromtimestamp(self.record.run_began, UTC)
        return self.flow_run.began if self.flow_run else None

    @property
    def launch(self) -> Launch | None:
        """How to start it again: as its flow run was, else from the configuration in its folder; None if there is none,
        or its secrets are masked."""
        parameters = self.flow_run.parameters if self.flow_run is not None else {}
        run = self.folder.name if self.folder is not None and (self.folder / CLAIM).exists() else ""
        if isinstance(file := parameters.get("config"), str) and file:
            return Launch(file, tuple(_settings_of(parameters)), str(parameters.get("stage") or ""), run=run)
        if self.folder is None or not self.config or MASK in str(self.config):
            return None
        return Launch(str(config_path(self.folder)), run=run)

    @property
    def is_part(self) -> bool:
        """True if the folder records a trainer or an explorer alone, each of which has its own command."""
        algorithm_type, mode = ALGORITHMS.get(self.algorithm), value_at(self.config, "mode")
        source = value_at(self.config, "buffer.trainer_input.experience_buffer.storage_type")
        # A plugin's algorithm is unknown here, but its default storage type is recorded.
        trains_alone = source in ("file", "rollouts") if algorithm_type is None else not algorithm_type.uses_rollouts
        return not self.stages and (mode in ("explore", "serve") or (mode == "train" and not trains_alone))

    def seconds(self, now: datetime) -> float | None:
        """Return how long all attempts have taken so far; None if none has begun."""
        record, ended = self.record, self.flow_run.ended if self.flow_run else None
        until = ended if self.state.is_over else now
        if (record and record.seconds is not None) or self.began is None or until is None:
            return record.seconds if record else None
        earlier, began = (record.earlier, record.began) if record else (0.0, self.began.timestamp())
        return earlier + max(until.timestamp() - began, 0.0)


def _settings_of(parameters: Mapping[str, Any]) -> list[str]:
    """Return a flow run's overrides, main settings and model, the last one of each key, without needless quotes."""
    main_settings, stage = {name: parameters.get(name) for name in MAIN_SETTINGS}, str(parameters.get("stage") or "")
    overrides, last = with_main_settings(parameters.get("overrides") or (), stage, **main_settings), dict[str, str]()
    if (model := parameters.get("model_path")) and not stage:  # a stage begins with the previous one's
        overrides.append(f"model.model_path={model}")
    for key, equals, value in (override.partition("=") for override in overrides):
        plain = QUOTED.fullmatch(value)
        last.pop(key, None)
        last[key] = equals + (plain[1] if plain and parse_value(plain[1]) == plain[1] else value)
    return [key + value for key, value in last.items()]


def known_runs(settings: StudioSettings) -> tuple[list[Run], str]:
    """Return all runs, and why Prefect's are missing if it does not answer, as after `trinity down`."""
    try:
        flow_runs = recent_runs(settings.api_url) if settings.api_url else []
    except api_faults() as error:
        return find_runs(settings.checkpoints), f"Prefect does not answer at {settings.api_url}: {error}"
    return find_runs(settings.checkpoints, flow_runs), ""


def find_runs(checkpoints: Path, flow_runs: Sequence[FlowRunSeen] = ()) -> list[Run]:
    """Return all runs, newest first, each followed by its stages."""
    paths = [path for path in checkpoints.glob("*/*") if (path / "monitor").is_dir() or (path / "buffer").is_dir()]
    folders = {f"{path.parent.name}/{path.name}": path for path in paths}
    by_name: dict[str, list[FlowRunSeen]] = {}
    for seen in flow_runs:
        if seen.flow not in SIDE_FLOWS:
            by_name.setdefault(_name_of(seen, folders), []).append(seen)
    for of_name in by_name.values():
        of_name.sort(key=lambda seen: seen.flow == "gate")  # `trinity promote` bears the name of the candidate's run
    names = dict.fromkeys([*folders, *reversed(by_name)])
    runs = {name: _run(name, folders.get(name), by_name.get(name, [])) for name in names}
    parents = {stage: name for name, run in runs.items() for stage in run.stages.values()}
    with_parents = {name: replace(run, parent=parents.get(name, "")) for name, run in _scored_by_next_stages(runs)}
    return list(_nested({name: _with_stages(run, with_parents) for name, run in with_parents.items()}))


def _scored_by_next_stages(runs: Mapping[str, Run]) -> Iterator[tuple[str, Run]]:
    """Yield all runs by name. A stage that was not evaluated has the score that the next one began with."""
    for name, run in runs.items():
        following = next_stage(run.folder) if run.folder and not run.scores else None
        first = runs.get(f"{following[0].parent.name}/{following[0].name}") if following else None
        if following and first and 0 in first.scores:
            step = following[1]
            intervals = {step: first.intervals[0]} if 0 in first.intervals else {}
            begun = {name: {step: curve[0]} for name, curve in first.curves.items() if 0 in curve}  # its evaluation
            run = replace(run, scores={step: first.scores[0]}, intervals=intervals, curves=run.curves | begun)
        yield name, run


def ancestors(job_dir: Path) -> list[Ancestor]:
    """Return the models that a run's checkpoints descend from, oldest first; empty if not recorded. A checkpoint below
    another root is a plain model, because its run has no page here."""
    chain: list[Ancestor] = []
    model, root = parent_of(job_dir, max(whole_steps(job_dir), default=0)), job_dir.parent.parent.resolve()
    for ancestor in ancestry(model) if model else ():
        has_page = ancestor.folder is not None and ancestor.folder.parent.parent.resolve() == root
        chain.append(ancestor if has_page else Ancestor(ancestor.model))
        if not has_page:
            break
    return chain[::-1]


def curves_by_stage(run: Run, runs: Sequence[Run]) -> dict[str, Curves]:
    """Return stage → its curves by the train steps of the pipeline; those of a run without stages by its name."""
    by_name = {stage.name: stage for stage in runs if stage.parent == run.name}
    stages = {name: (by_name[of].curves, by_name[of].step) for name, of in run.stages.items() if of in by_name}
    return one_after_another(run.curves, stages) if stages else {run.name: run.curves}


class SeenRun:
    """Content of a run's folder as of the last look. A look reads the new lines of its metrics only; earlier content,
    which a page may be showing, does not change, and is not kept."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, Lock()
        self._metrics = MetricsReader(folder, self._forget)
        self._changed: list[tuple[Path, int, int]] = []
        self._total: int | None = None
        self._run = Run(f"{folder.parent.name}/{folder.name}", RunState.UNKNOWN, folder)

    def read(self) -> Run:
        folder, layout = self._folder, JobLayout(self._folder)
        paths = [metrics_path(folder), record_path(folder), config_path(folder)]
        paths += [layout.note, layout.trainer_meta, layout.stages]
        with self._lock:  # each page runs in its own thread
            changed = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
            if changed != self._changed:
                curves = self._curves()
                self._run = _read(self._run, folder, curves, self._metrics.evaluations, self._total)
                self._changed = changed
            return self._run

    def _curves(self) -> Curves:
        new: Curves = {}
        for line in self._metrics.read():
            self._total = line.total_steps or self._total
            for name, value in full_names(line).items():
                if isfinite(value):
                    new.setdefault(name, {})[line.step] = Point(value, line.time)
        known = self._run.curves
        longer = {name: dict(sorted((known.get(name, {}) | curve).items())) for name, curve in new.items()}
        return dict(sorted((known | longer).items()))

    def _forget(self) -> None:
        self._run = replace(self._run, curves={})


_seen = lru_cache(maxsize=512)(SeenRun)


def _read(run: Run, folder: Path, curves: Curves, evaluations: list[MetricLine], total: int | None) -> Run:
    layout, record, config = JobLayout(folder), read_record(folder), known_config(folder)
    meta = read_json(layout.trainer_meta)
    paces = (curve for name, curve in curves.items() if name.endswith("timing_s/step"))
    trainer = curves.get("timing_s/step") or next(paces, None)
    model = str(meta.get("model") or value_at(config, "model.model_path") or "")
    origin, step = run_of(model)
    return replace(
        run, config=config, record=record, note=Note.of(folder),
        curves=curves, scores=scores_like_the_newest(evaluations), intervals=intervals_like_the_newest(evaluations),
        algorithm=str(value_at(config, "algorithm.algorithm_type") or value_at(meta, "algorithm.algorithm_type") or ""),
        model=label_of(model),
        source=(f"{origin.parent.name}/{origin.name}", step) if origin else ("", 0),
        stages={stage: f"{run.parent.name}/{run.name}" for stage, run in stages_of(folder).items()},
        step=max(trainer or (step for curve in curves.values() for step in curve), default=0),
        total_steps=value_at(config, "buffer.total_steps") or total,
        seconds_a_step=seconds_a_step([point.time for point in trainer.values()] if trainer else []),
    )  # fmt: skip


def _name_of(run: FlowRunSeen, folders: Collection[str]) -> str:
    if run.tags.keys() >= {"project", "name"}:
        return f"{run.tags['project']}/{run.tags['name']}"
    # Its configuration is not read yet, or was refused, which says nothing of an existing run of that name.
    title, file = run.title.partition(REFUSED)[0], run.parameters.get("config")
    if title.count("/") == 1 and not (run.kind == "FAILED" and title in folders):
        return title
    parts = (override.partition("=") for override in _settings_of(run.parameters))
    shown = [f"{key}{equals}{without_secrets(value, key.split('.')[-1])}" for key, equals, value in parts]
    return f"{run.title} ({' '.join([run.flow, str(file), *shown])})" if file else run.title


def _run(name: str, folder: Path | None, flow_runs: Sequence[FlowRunSeen]) -> Run:
    run = Run(name, RunState.UNKNOWN) if folder is None else _seen(folder).read()
    state, detail = (run.record.present_state, run.record.error) if run.record else (run.state, "")
    for flow_run in flow_runs[:1]:
        seen = PREFECT_STATES.get(flow_run.kind, RunState.UNKNOWN)
        alive = seen is RunState.WAITING or not (seen.is_over or state is RunState.KILLED)
        if alive or state is RunState.UNKNOWN or folder is None:
            state = seen
        detail = flow_run.message if state is seen else detail
    if folder is not None and is_starting(folder, run.record):
        state, detail = RunState.STARTING, ""
    return replace(run, state=state, detail=detail, flow_runs=tuple(flow_runs))


def _with_stages(run: Run, runs: Mapping[str, Run]) -> Run:
    """Add to a pipeline its stages' scores by the train steps of all, model at the start, and stage in progress."""
    stages = [runs[name] for name in run.stages.values() if name in runs]
    if not stages:
        return run
    scores, intervals, begin = {**run.scores}, {**run.intervals}, 0
    for stage in stages:
        scores |= {begin + step: score for step, score in sorted(stage.scores.items())}
        intervals |= {begin + step: interval for step, interval in stage.intervals.items()}
        begin += stage.step
    begun = [stage for stage in stages if not stage.state.is_over] or [stage for stage in stages if stage.step][-1:]
    part = replace(begun[0], state=run.state) if begun else None  # a stage learns later of its pipeline's end
    return replace(run, scores=scores, intervals=intervals, model=stages[0].model, part=part)


def _nested(runs: Mapping[str, Run]) -> Iterator[Run]:
    """Yield runs by start time, unstarted ones first, each followed by its stages in order."""
    for run in sorted(runs.values(), key=lambda run: run.began or datetime.max.replace(tzinfo=UTC), reverse=True):
        if not run.parent:
            yield run
            stages = [runs[name] for name in run.stages.values() if name in runs]
            yield from (stage for stage in stages if stage.parent == run.name)
