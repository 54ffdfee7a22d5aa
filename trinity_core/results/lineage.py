"""`trinity lineage`: where a checkpoint comes from (runs, data rows, code, gates), and which checkpoints saw a row.

All of it is read from what runs have stored. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, select

from trinity_core.base.errors import DataError
from trinity_core.base.files import read_json
from trinity_core.base.layout import JobLayout, now_at, run_of, stages_of
from trinity_core.exchange.checkpoints.beginning import recorded_beginning
from trinity_core.exchange.checkpoints.convert import convert
from trinity_core.exchange.checkpoints.resume import latest_whole, whole_steps
from trinity_core.exchange.tracking.champions import history
from trinity_core.exchange.tracking.pauses import Pause, read_pauses
from trinity_core.exchange.tracking.run_record import read_record
from trinity_core.exchange.weights_digest import model_folder
from trinity_core.results.audit import open_store, runs_in, stores_of
from trinity_core.results.data_rows import DataSet, input_digests, supervised_sets, task_sets

SHOWN = 5
"""Rows of a task set that are shown without `--rows`."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A model in the chain: a run's checkpoint, or the initial model."""

    model: str
    folder: Path | None = None
    """The run's folder; None for the initial model."""
    step: int = 0


@dataclass(frozen=True)
class TrainedRows:
    """Rows that a checkpoint was trained on."""

    data_set: str
    """Name of the data set, or of the task sets."""
    count: int
    """Tasks drawn, of which some may be the same row; for supervised runs the rows of the data set."""
    batches: tuple[int, int] | None
    """First and last train step with one of them; None for supervised runs, which take all rows in epochs."""
    places: Sequence[str] = ()
    """File and line of each different row, or of the first few; `<data set>/<row>` if its files are not there."""


@dataclass(frozen=True)
class Link:
    """One model of the chain with what is recorded about it."""

    model: str
    run: str = ""
    step: int = 0
    code: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    """Data file or plugin → digest; empty if the run has not ended."""
    rows: Sequence[TrainedRows] = ()
    gates: Sequence[Mapping[str, Any]] = ()
    """Entries of the project's champions that are this checkpoint."""
    pauses: Sequence[Pause] = ()
    """Pauses of the run up to this checkpoint, with what a person decided."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A run that trained on a row, or descends from a checkpoint that did."""

    run: str
    step: int
    """First train step whose batch had the row; 0 for descendants and supervised runs."""
    how: str
    """`trained`, `in its data set`, or `descends from <run> step <n>`."""
    checkpoints: Sequence[int]
    """Checkpoints that are there and have seen it."""


def parent_of(folder: Path, step: int) -> str | None:
    """Return the model that a run began with, as its checkpoint or its folder records it, where it is now."""
    began = recorded_beginning(folder, step)
    recorded = began.model if began is not None else read_json(JobLayout(folder).trainer_meta).get("model")
    model = recorded if isinstance(recorded, str) else read_json(JobLayout(folder).beginning).get("model")
    return now_at(model, folder.parent.parent) if model else None


def ancestry(model: str) -> Iterator[Ancestor]:
    """Yield a model and those it descends from, newest first; the last one was made by no run that is still there."""
    seen: set[Path] = set()
    parent: str | None = model
    while parent is not None:
        folder, step = run_of(parent)
        if folder is None or folder in seen or not folder.is_dir():
            yield Ancestor(parent)
            return
        seen.add(folder)
        yield Ancestor(parent, folder, step)
        parent = parent_of(folder, step)


def next_stage(folder: Path) -> tuple[Path, int] | None:
    """Return the run of the stage of the same pipeline that began with a checkpoint of the run in `folder`, and the
    checkpoint's step; None if no stage has. Other runs that begin with this checkpoint may have other eval sets."""
    for recorded in folder.parent.glob("*/stages.json"):
        stages = [*stages_of(recorded.parent).values()]
        if folder in stages:
            for following in stages[stages.index(folder) + 1 :]:
                origin, step = run_of(parent_of(following, 0) or "")
                if origin is not None and origin.name == folder.name:
                    return following, step
    return None


def newest_checkpoint(job_dir: Path) -> str:
    """Return the folder of the newest intact checkpoint of a run, or of a pipeline's last stage that has one. Raises
    DataError if there is none."""
    for run in reversed(runs_in(job_dir)):
        if (step := latest_whole(run)) is not None:
            return str(JobLayout(run).step(step))
    raise DataError(f"{job_dir} has no checkpoint: train it, or name another one", key=str(job_dir))


def weights_of(model: str) -> Path:
    """Return the Hugging Face folder of a checkpoint, which is converted, of a folder or of a hub name in the local
    cache. Raises DataError if there is none."""
    path = Path(model).expanduser().resolve()
    if (path / "config.json").is_file():
        return path
    folder, step = run_of(path)
    if folder is not None and (folder / f"global_step_{step}").is_dir():
        return convert(folder / f"global_step_{step}", merge=True)
    if (cached := model_folder(model)) is None or not (cached / "config.json").is_file():
        raise DataError(f"{model} is neither a checkpoint nor a model folder with a config.json", key=model)
    return cached


def lineage(path: Path, all_rows: bool = False) -> list[Link]:
    """Return the chain of a checkpoint, or of a run's newest one, newest first; with `all_rows`, every row's file and
    line. Raises DataError if there is no checkpoint."""
    path = path.resolve()
    if run_of(path)[0] is None:
        path = Path(newest_checkpoint(path))
    elif not path.is_dir():
        have = ", ".join(map(str, whole_steps(path.parent))) or "none"
        raise DataError(f"there is no checkpoint {path}; steps of this run that have one: {have}", key=str(path))
    return [
        Link(one.model) if one.folder is None else _link(one.model, one.folder, one.step, all_rows)
        for one in ancestry(str(path))
    ]


def _link(model: str, folder: Path, step: int, all_rows: bool) -> Link:
    record = read_record(folder)
    gates = [asdict(entry) for entry in history(folder.parent) if run_of(entry.model) == (folder, step)]
    return Link(
        model, f"{folder.parent.name}/{folder.name}", step, record.software if record is not None else {},
        input_digests(folder),
        [*_drawn_rows(folder, step, all_rows), *_supervised_rows(folder, all_rows)], gates,
        [pause for pause in read_pauses(folder) if pause.step <= step],
    )  # fmt: skip


def _drawn_rows(folder: Path, step: int, all_rows: bool) -> Iterator[TrainedRows]:
    """Yield the tasks in the batches up to `step` from the store's ledger: their number, and some or all rows.

    Their number is read without the tasks: that of a million rows would take seconds.
    """
    with _ledger(folder) as (connection, t):
        if connection is None:
            return
        leased = t.lease_groups.c.step <= step
        count = select(func.count(), func.min(t.lease_groups.c.step), func.max(t.lease_groups.c.step)).where(leased)
        tasks = select(t.groups.c.task).join_from(t.lease_groups, t.groups, t.groups.c.id == t.lease_groups.c.group_id)
        tasks = tasks.where(leased, t.groups.c.task.is_not(None)).limit(None if all_rows else SHOWN)
        draws, first, last = connection.execute(count).one()
        rows: dict[str, set[int]] = {}
        for name, _, row in (task.rpartition("/") for task in connection.scalars(tasks)):
            rows.setdefault(name, set()).add(int(row))
    sets = task_sets(folder)
    places = [
        place
        for name, numbers in sorted(rows.items())
        for place in sets.get(name, DataSet(folder, name, {})).places(sorted(numbers))
    ]
    if draws:
        yield TrainedRows(", ".join(sets), draws, (first, last), places)


def _supervised_rows(folder: Path, all_rows: bool) -> Iterator[TrainedRows]:
    """Yield the data sets of a supervised run as a whole."""
    for data in _listed_sets(folder):
        places = [f"{file}:{line}" for file, line in data.rows()]
        yield TrainedRows(data.name, len(places), None, places if all_rows else places[:SHOWN])


def _listed_sets(folder: Path) -> list[DataSet]:
    """Return the data sets of a supervised run whose rows stand in files, such as feedback."""
    rollouts = [data for data in supervised_sets(folder, ["rollouts"]) if data.path.endswith(".jsonl")]
    return [*supervised_sets(folder), *rollouts]


def sightings(root: Path, file: Path, line: int) -> list[Sighting]:
    """Return the runs below `root` (a run, a pipeline, a project, or all checkpoints) whose checkpoints saw a row, and
    those that descend from one of these."""
    root, file = root.resolve(), file.expanduser().resolve()
    patterns = [f"{depth}monitor/config.yaml" for depth in ("", "*/", "*/*/")]
    runs = [path.parents[1] for top in runs_in(root) for pattern in patterns for path in sorted(top.glob(pattern))]
    seen = {run: step for run in runs if (step := _first_step(run, file, line)) is not None}
    sighted = [
        Sighting(_name(run), step, "trained" if step else "in its data set", [s for s in whole_steps(run) if s >= step])
        for run, step in seen.items()
    ]
    for run in (run for run in runs if run not in seen):
        steps = whole_steps(run)
        model = parent_of(run, max(steps, default=0))
        for folder, step in ((one.folder, one.step) for one in ancestry(model)) if model else ():
            if folder in seen and step >= seen[folder]:
                sighted.append(Sighting(_name(run), 0, f"descends from {_name(folder)} step {step}", steps))
                break
    return sighted


def _first_step(run: Path, file: Path, line: int) -> int | None:
    """Return the first train step that took the row; 0 if it is in a supervised data set; None if none has."""
    if any(data.number_of(file, line) is not None for data in _listed_sets(run)):
        return 0
    numbers = {name: data.number_of(file, line) for name, data in task_sets(run).items()}
    tasks = [f"{name}/{number}" for name, number in numbers.items() if number is not None]
    if not tasks:
        return None
    with _ledger(run) as (connection, t):
        if connection is None:
            return None
        groups = connection.scalars(select(t.groups.c.id).where(t.groups.c.task.in_(tasks))).all()
        leases = t.lease_groups.c
        step: int | None = connection.scalar(select(func.min(leases.step)).where(leases.group_id.in_(groups)))
        return step


@contextmanager
def _ledger(run: Path) -> Iterator[tuple[Connection | None, Any]]:
    """Open the run's store for reading; (None, None) if it has none."""
    if (store := stores_of(run).get(run.name)) is None:
        yield None, None
        return
    with closing(open_store(run, store)) as database, database.read() as connection:
        yield connection, database.tables


def _name(run: Path) -> str:
    return f"{run.parent.name}/{run.name}"


def software_text(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def lineage_text(links: Sequence[Link]) -> str:
    lines = []
    for place, link in enumerate(links):
        title = f"{link.run} step {link.step}" if link.run else f"model {link.model}"
        lines.append(title if not place else f"began with {title}")
        if link.code:
            lines.append(f"  code   {software_text(link.code)}")
        lines += [f"  data   {name}  {digest}" for name, digest in link.data.items()]
        for rows in link.rows:
            drawn = f" drawn at steps {rows.batches[0]} to {rows.batches[1]}" if rows.batches else ", all in each epoch"
            lines.append(f"  rows   {rows.count} of {rows.data_set}{drawn}")
            lines += [f"    {where}" for where in rows.places]
            if len(rows.places) == SHOWN < rows.count:
                lines.append("    … all of them: --rows")
        lines += [f"  pause  {pause.text}" for pause in link.pauses]
        for gate in link.gates:
            evidence = gate["evidence"]
            told = f"over {evidence['champion']}" if evidence else "by a step back"
            approved = f", approved: {evidence['approval']}" if evidence.get("approval") else ""
            lines.append(f"  gate   champion {told}{approved}")
    return "\n".join(lines)


def sightings_text(found: Sequence[Sighting]) -> str:
    if not found:
        return "no checkpoint has seen this row"
    steps = {one.run: f" at step {one.step}" if one.step else "" for one in found}
    kept = {one.run: ", ".join(map(str, one.checkpoints)) or "none" for one in found}
    return "\n".join(f"{one.run}  {one.how}{steps[one.run]}; checkpoints {kept[one.run]}" for one in found)
