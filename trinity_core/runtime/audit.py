"""`trinity audit`: finds a run's store and checkpoints, and checks that they account for every task drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trinity_core.checkpoints.resume import whole_steps
from trinity_core.config import Config, stages, store_url
from trinity_core.config.paths import DATABASES
from trinity_core.data.session_log import read_sessions
from trinity_core.errors import DataError
from trinity_core.files import read_json
from trinity_core.layout import JobLayout
from trinity_core.runtime.configuration import load_checked
from trinity_core.store.audit import Audit, archived, judge, read
from trinity_core.store.database import Database, namespaces
from trinity_core.store.schema import tables

COUNTS = (
    "tasks_drawn", "experiences_produced", "trained", "dropped", "failed", "pending", "lost", "duplicated",
    "sampled_tokens", "lineage",
)  # fmt: skip


def audit_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, Audit]:
    """The audit of the run in `folder`, or of each stage of the pipeline in it: folder's name -> audit.

    The store is `url`'s, else that of `config`, a YAML file (which may hold a password and names the stages), else the
    SQLite file in the run's `buffer` folder. Nothing is changed. Raises `DataError` if there is no store.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    folder = folder.resolve()
    runs: dict[str, str]
    if config is not None:
        configured = _configured(folder, load_checked(config, overrides))
        runs = {name: url or found for name, found in configured.items()}
    elif url is not None:
        runs = {folder.name: url}
    else:
        runs = {run.name: found for run in _runs(folder) if (found := _sqlite(run)) is not None}
    if not runs:
        raise DataError(
            f"{folder} has no experience store: give the folder of a run that explores, "
            "<checkpoint_root_dir>/<project>/<name>, and --config or --store if its store is elsewhere"
        )
    return {name: _audit(folder.parent / name, found) for name, found in runs.items()}


def audit_text(name: str, audit: Audit) -> str:
    """An audit for people."""
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
        *([f"  sessions    sampled {audit.sampled_tokens} tokens with a loss"] if audit.sampled_tokens else []),
        *(f"  problem: {problem}" for problem in audit.problems),
    ]
    verdict = "Every task is accounted for." if audit.clean else "NOT every task is accounted for."
    return "\n".join([*lines, f"  {verdict}"])


def audit_json(audits: dict[str, Audit]) -> dict[str, object]:
    """One run's audit; the stages of a pipeline under their names, with sums of their counts (lineage: the highest)."""
    if len(audits) == 1:
        [audit] = audits.values()
        return audit.to_dict() | {"clean": audit.clean}
    sums: dict[str, object] = {name: sum(getattr(each, name) for each in audits.values()) for name in COUNTS[:-1]}
    sums["lineage"] = max(each.lineage for each in audits.values())
    each_stage = {name: each.to_dict() | {"clean": each.clean} for name, each in audits.items()}
    return sums | {"clean": all(each.clean for each in audits.values()), "stages": each_stage}


def _listed(counts: Counter[str]) -> str:
    return "".join(f"\n    {number} × {name}" for name, number in counts.most_common())


def _audit(folder: Path, url: str) -> Audit:
    layout = JobLayout(folder)
    before = max(whole_steps(layout), default=0)
    namespace = _namespace(folder, namespaces(url), url)
    database = Database(url, tables(namespace), namespace, read_only=True)
    try:
        with database.read() as connection:
            seen = read(connection, database.tables)
    finally:
        database.close()
    after = max(whole_steps(layout), default=0)
    return judge(seen, archived(layout.archive), before, after, read_sessions(layout.buffer))


def _runs(folder: Path) -> Sequence[Path]:
    """The folder itself if a run lies in it, else those of the stages of its pipeline, which lie beside it.

    Before a pipeline's summary names them, all folders named after it count as its stages.
    """
    if _sqlite(folder) or any(folder.glob(".training.lock")) or any(folder.glob(".explorer_*.lock")):
        return [folder]
    named = (read_json(folder / "summary.json") or {}).get("steps")
    if isinstance(named, dict):
        return [folder.with_name(f"{folder.name}_{stage}") for stage in named]
    return sorted(folder.parent.glob(f"{folder.name}_*"))


def _sqlite(folder: Path) -> str | None:
    """The URL of the run's own SQLite file."""
    found = [path for path in sorted((folder / "buffer").glob("*")) if path.suffix in DATABASES]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder / 'buffer'} has several databases ({names}): say with --store which one is the run's")
    return f"sqlite:///{found[0].absolute()}" if found else None


def _configured(folder: Path, config: Config) -> dict[str, str]:
    """Name -> store of the run in `folder`, or of each stage of the pipeline in it that has one, by the configuration.

    The folder of a configuration without stages may have been moved or renamed.
    """
    found = stages(config)
    runs = [each for each in found if each.name == folder.name]
    if not config.stages:
        runs = [found[0].with_values({"name": folder.name})]
    elif not runs:
        own = [each for each in found if each.algorithm_type.uses_rollouts and each.mode != "bench"]
        runs = [each.with_values({"name": folder.name + each.name.removeprefix(config.name)}) for each in own]
    place = {"checkpoint_root_dir": str(folder.parent.parent), "project": folder.parent.name}
    placed = [run.with_values(place) for run in runs]
    return {run.name: store_url(run) for run in placed if run.job_dir.is_dir()}


def _namespace(folder: Path, known: Sequence[str], url: str) -> str:
    """The run's name in a database: its folder, or the only one there is (a folder may have been moved)."""
    mine = [name for name in known if name and Path(name).resolve() == folder]
    if mine or (len(known) == 1 and url.startswith("sqlite")):
        return (mine or list(known))[0]
    raise DataError(f"the database has no run of {folder}, but of {', '.join(known) or 'none'}")
