"""Finds the experience store of a run, or of each stage of a pipeline; `trinity audit`, which checks that store and
checkpoints account for every task drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from difflib import SequenceMatcher
from pathlib import Path

from trinity_core.base.errors import DataError
from trinity_core.base.layout import JobLayout, stages_of
from trinity_core.base.plugins import load_plugins
from trinity_core.config import Config, load_config, stages, store_url
from trinity_core.data.session_log import read_sessions
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.store.audit import Audit, archived, judge, read
from trinity_core.exchange.store.database import Database, is_of_one_machine, namespaces, stores_in
from trinity_core.exchange.store.run_store import read_identity
from trinity_core.exchange.store.schema import tables
from trinity_core.exchange.tracking.metrics_file import metrics_path
from trinity_core.exchange.tracking.run_record import config_path

NAMED = 3
"""Runs that are named where a folder has none."""


def stores_of(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, str]:
    """Return folder name → store URL for the run in `folder`, or for the stages of the pipeline in it.

    The store is `url`, else that in `config`, a YAML file (which may hold a password and names the stages), else the
    SQLite file in the run's `buffer` folder.
    """
    if config is not None:
        configured = _configured(folder, load_config(config, overrides, load_plugins))
        return {name: url or configured_url for name, configured_url in configured.items()}
    if url is not None:
        return {folder.name: url}
    return {run.name: store for run in runs_in(folder) if (store := _sqlite(run)) is not None}


def open_store(folder: Path, url: str) -> Database:
    namespace = _namespace(folder, namespaces(url), url)
    return Database(url, tables(namespace), namespace, read_only=True)


def runs_in(folder: Path) -> Sequence[Path]:
    """Return the folders of the stages of the pipeline in `folder`, next to it; without a pipeline `folder`."""
    return [*stages_of(folder).values()] or [folder]


def stored_runs(folder: Path) -> Sequence[Path]:
    """Like `runs_in`, of the resolved folder. Raises DataError if no run has recorded anything there."""
    runs = runs_in(folder.resolve())
    if not any(config_path(run).exists() or metrics_path(run).exists() for run in runs):
        near = ", ".join(str(run) for run in _runs_near(folder)[:NAMED])
        meant = f"such as {near}" if near else "<checkpoint_root_dir>/<project>/<name>"
        raise DataError(f"there is no run in {folder}: give a run's folder, {meant}", key=str(folder))
    return runs


def _runs_near(folder: Path) -> list[Path]:
    """Return the runs below a folder that is none, those last changed first; or else those next to it or a level
    deeper, those of the most similar name first."""
    if below := _runs_below(folder):
        return sorted(below, key=lambda run: config_path(run).stat().st_mtime, reverse=True)
    likeness = {run: SequenceMatcher(None, run.name, folder.name).ratio() for run in _runs_below(folder.parent)}
    return sorted(likeness, key=likeness.__getitem__, reverse=True)


def _runs_below(folder: Path) -> list[Path]:
    return [file.parent.parent for depth in ("*", "*/*") for file in folder.glob(str(config_path(Path(depth))))]


def _sqlite(folder: Path) -> str | None:
    databases = stores_in(folder / "buffer")
    if len(databases) > 1:
        names = ", ".join(path.name for path in databases)
        raise DataError(f"{folder / 'buffer'} has several databases ({names}): say with --store which one is the run's")
    return f"sqlite:///{databases[0].absolute()}" if databases else None


def _configured(folder: Path, config: Config) -> dict[str, str]:
    """Return name → store of the run in `folder`, or of each stage of its pipeline that has one, by the configuration.

    The folder of a configuration without stages may have been moved or renamed.
    """
    stage_configs = stages(config)
    runs = [stage for stage in stage_configs if stage.name == folder.name]
    if not config.stages:
        runs = [stage_configs[0].with_values({"name": folder.name})]
    elif not runs:
        with_store = [stage for stage in stage_configs if stage.algorithm_type.uses_rollouts and stage.mode != "bench"]
        runs = [stage.with_values({"name": folder.name + stage.name.removeprefix(config.name)}) for stage in with_store]
    location = {"checkpoint_root_dir": str(folder.parent.parent), "project": folder.parent.name}
    placed = [run.with_values(location) for run in runs]
    return {run.name: store_url(run) for run in placed if run.job_dir.is_dir()}


def _namespace(folder: Path, namespaces_there: Sequence[str], url: str) -> str:
    """Return the run's namespace in a database, as its folder records it.

    Older releases recorded nothing: there it is the folder's path, or the only namespace (the folder may have been
    moved).
    """
    identity = read_identity(folder)
    if identity is not None and identity.namespace in namespaces_there:
        return identity.namespace
    mine = [] if identity else [name for name in namespaces_there if name and Path(name).resolve() == folder]
    if mine or (identity is None and len(namespaces_there) == 1 and is_of_one_machine(url)):
        return (mine or list(namespaces_there))[0]
    others = ", ".join(namespaces_there)
    there = f"but of {others}" if others else "and no other one: name the run's database by --store, or restore it"
    raise DataError(f"the database has no run of {folder}, {there}", key=str(folder))


COUNTS = (
    "tasks_drawn", "experiences_produced", "trained", "dropped", "failed", "pending", "lost", "duplicated",
    "sampled_tokens",
)  # fmt: skip


def audit_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, Audit]:
    """Return folder name → audit for the run in `folder`, or for each stage of the pipeline in it.

    `stores_of` finds the stores. Nothing is changed. Raises DataError if there is none.
    """
    root = folder.resolve()
    runs = stores_of(root, config, overrides, url) if root.is_dir() else {}
    if not runs:
        stored_runs(folder)  # raises for a folder that is no run
        raise DataError(
            f"{folder} has no experience store: give the folder of a run that explores, and --config or --store if its "
            "store is elsewhere",
            key=str(folder),
        )
    return {name: _audit(root.parent / name, url) for name, url in runs.items()}


def audit_text(name: str, audit: Audit) -> str:
    trained = f"  at steps {min(audit.trained_at)} to {max(audit.trained_at)}" if audit.trained_at else ""
    lines = [
        name,
        f"  tasks drawn {audit.tasks_drawn}, experiences produced {audit.experiences_produced}",
        f"  trained     {audit.trained}{trained}",
        f"  dropped     {audit.dropped}{_listed(audit.dropped_by)}",
        f"  failed      {audit.failed}{_listed(audit.failed_because)}",
        f"  pending     {audit.pending}",
        f"  lost        {audit.lost}",
        f"  duplicated  {audit.duplicated}",
        f"  lineage     {audit.lineage}, checkpoint {audit.checkpoint or 'none'}",
        *([f"  experiences dropped {lost.total()}{_listed(lost)}"] if (lost := audit.experiences_dropped_by) else []),
        *([f"  sessions    sampled {audit.sampled_tokens} tokens with a loss"] if audit.sampled_tokens else []),
        *(f"  problem: {problem}" for problem in audit.problems),
    ]
    verdict = (
        "Every task is accounted for." if audit.tasks_drawn else "No task has been drawn: nothing is accounted for."
    )
    return "\n".join([*lines, f"  {verdict if audit.clean else 'NOT every task is accounted for.'}"])


def accounts_for_all(audits: Mapping[str, Audit]) -> bool:
    """True if every task is accounted for and at least one was drawn."""
    return all(audit.clean for audit in audits.values()) and any(audit.tasks_drawn for audit in audits.values())


def audit_json(audits: dict[str, Audit]) -> dict[str, object]:
    """Return one run's audit, or a pipeline's stages by name with sums of their counts (lineage: the highest)."""
    clean = {"clean": accounts_for_all(audits)}
    if len(audits) == 1:
        [audit] = audits.values()
        return audit.to_dict() | clean
    sums: dict[str, object] = {name: sum(getattr(audit, name) for audit in audits.values()) for name in COUNTS}
    sums["lineage"] = max(audit.lineage for audit in audits.values())
    each_stage = {name: audit.to_dict() | {"clean": audit.clean} for name, audit in audits.items()}
    return sums | clean | {"stages": each_stage}


def _listed(counts: Counter[str]) -> str:
    return "".join(f"\n    {number} × {name}" for name, number in counts.most_common())


def _audit(folder: Path, url: str) -> Audit:
    layout = JobLayout(folder)
    newest = max(whole_steps(layout.root, or_unreadable=True), default=0)
    with closing(open_store(folder, url)) as database, database.read() as connection:
        seen = read(connection, database.tables)
    after = max(whole_steps(layout.root, or_unreadable=True), default=0)
    return judge(seen, archived(layout.archive), newest, after, read_sessions(layout.buffer))
