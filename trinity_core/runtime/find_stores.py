"""Finds the experience store of a run, or of each stage of a pipeline, and opens it read-only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_core.config import Config, stages, store_url
from trinity_core.config.paths import DATABASES
from trinity_core.errors import DataError
from trinity_core.files import read_json
from trinity_core.layout import JobLayout
from trinity_core.runtime.configuration import load_checked
from trinity_core.store.database import Database, is_of_one_machine, namespaces
from trinity_core.store.run_store import read_identity
from trinity_core.store.schema import tables


def stores_of(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, str]:
    """Return folder name → store URL for the run in `folder`, or for the stages of the pipeline in it.

    The store is `url`, else that in `config`, a YAML file (which may hold a password and names the stages), else the
    SQLite file in the run's `buffer` folder.
    """
    if config is not None:
        configured = _configured(folder, load_checked(config, overrides))
        return {name: url or configured_url for name, configured_url in configured.items()}
    if url is not None:
        return {folder.name: url}
    return {run.name: store for run in runs_in(folder) if (store := _sqlite(run)) is not None}


def open_store(folder: Path, url: str) -> Database:
    namespace = _namespace(folder, namespaces(url), url)
    return Database(url, tables(namespace), namespace, read_only=True)


def runs_in(folder: Path) -> Sequence[Path]:
    """Return the folder itself if it is a run's, else those of its pipeline's stages, which are next to it.

    A pipeline's folder may also hold a store without rollouts, from evaluations by older releases. A pipeline records
    its stages' folders at its start. Older releases listed them in the summary; before that, all folders named after
    the pipeline count.
    """
    if any(folder.glob(".training.lock")) or any(folder.glob(".explorer_*.lock")):
        return [folder]
    named = (read_json(folder / "summary.json") or {}).get("steps")
    usual = {stage: f"{folder.name}_{stage}" for stage in named} if isinstance(named, dict) else {}
    if stages := usual | (read_json(JobLayout(folder).stages) or {}):
        return [folder.with_name(name) for name in stages.values()]
    return [folder] if _sqlite(folder) else sorted(folder.parent.glob(f"{folder.name}_*"))


def _sqlite(folder: Path) -> str | None:
    databases = [path for path in sorted((folder / "buffer").glob("*")) if path.suffix in DATABASES]
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
        own = [stage for stage in stage_configs if stage.algorithm_type.uses_rollouts and stage.mode != "bench"]
        runs = [stage.with_values({"name": folder.name + stage.name.removeprefix(config.name)}) for stage in own]
    place = {"checkpoint_root_dir": str(folder.parent.parent), "project": folder.parent.name}
    placed = [run.with_values(place) for run in runs]
    return {run.name: store_url(run) for run in placed if run.job_dir.is_dir()}


def _namespace(folder: Path, known: Sequence[str], url: str) -> str:
    """Return the run's namespace in a database, as its folder records it.

    Older releases recorded nothing: there it is the folder's path, or the only namespace (the folder may have been
    moved).
    """
    identity = read_identity(folder)
    if identity is not None and identity.namespace in known:
        return identity.namespace
    mine = [] if identity else [name for name in known if name and Path(name).resolve() == folder]
    if mine or (identity is None and len(known) == 1 and is_of_one_machine(url)):
        return (mine or list(known))[0]
    raise DataError(f"the database has no run of {folder}, but of {', '.join(known) or 'none'}")
