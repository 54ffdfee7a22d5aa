"""A run as the page sees it: its store, archive, tokenizer and samples on disk. Read-only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from trinity_core.base.errors import DataError
from trinity_core.base.files import read_json
from trinity_core.base.layout import JobLayout
from trinity_core.config.findings import value_at
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.store.archive import Line, lines_of
from trinity_core.exchange.store.database import Database, databases_in
from trinity_core.exchange.store.run_store import read_identity
from trinity_core.exchange.store.schema import Tables
from trinity_core.exchange.tracking.rollouts import rollouts_dir
from trinity_core.exchange.tracking.run_record import known_config
from trinity_core.results.audit import open_store, runs_in, stored_runs, stores_of

log = logging.getLogger(__name__)


class ViewedRun:
    """One run; `store` is the URL of its store, if it has one. Thread-safe."""

    def __init__(self, folder: Path, store: str | None) -> None:
        self.folder = folder
        self.layout = JobLayout(folder)
        self._database: Database | None = open_store(folder, store) if store else None

    @property
    def has_store(self) -> bool:
        return self._database is not None

    @contextmanager
    def read(self) -> Iterator[tuple[Connection, Tables]]:
        """Open a short read transaction. Raises DataError if the run has no store."""
        if self._database is None:
            raise DataError(f"{self.folder.name} has no experience store")
        with self._database.read() as connection:
            yield connection, self._database.tables

    def experiences(self, group_id: int) -> list[Experience]:
        """Return the stored experiences of a group; empty if they have left the store."""
        with self.read() as (connection, t):
            blob = connection.scalar(select(t.experiences.c.blob).where(t.experiences.c.group_id == group_id))
        return [] if blob is None else from_bytes(blob)

    def archived(self, step: int, name: str, group_id: int) -> list[Line]:
        """Return a group's rows in the batch of train step `step`, with their advantages; none before a checkpoint
        contains that step."""
        archive = self.layout.archive
        batch = _batch(archive, step, archive.stat().st_mtime_ns) if archive.exists() else []
        return [line for line in batch if line["group"] in (name, f"{name}#{group_id}")]

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; None if it cannot be found."""
        for path in self._model_paths():
            try:
                return load_tokenizer(path)
            except (OSError, ValueError) as error:
                log.warning("%s has no tokenizer that can be loaded: %s", path, error)
        return None

    def _model_paths(self) -> Iterator[str]:
        """Yield local folders and hub names that may hold the tokenizer, the most reliable first."""
        model = value_at(known_config(self.folder), "model.model_path")
        meta = read_json(self.layout.trainer_meta)
        folders = [str(self.layout.huggingface(step)) for step in reversed(self.layout.steps())]
        for path in (model, *folders, meta.get("tokenizer"), meta.get("model")):
            if path and (not path.startswith(("/", ".")) or Path(path, "tokenizer_config.json").is_file()):
                yield path


@lru_cache(maxsize=16)
def _batch(archive: Path, step: int, _changed: int) -> list[Line]:
    return lines_of(archive, step)


class RunFolders(Mapping[str, ViewedRun]):
    """All runs in a folder of checkpoints, by `project/name`: looked up each time, opened on demand."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._open = lru_cache(maxsize=32)(lambda folder, store, _identity: ViewedRun(folder, store))

    def __iter__(self) -> Iterator[str]:
        folders = (path for path in self._checkpoints.glob("*/*/") if _has_something(path))
        return iter(sorted(folder.relative_to(self._checkpoints).as_posix() for folder in folders))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        parts = name.split("/") if isinstance(name, str) else []
        is_plain = len(parts) == 2 and not {"", ".", ".."} & {*parts}
        folder = self._checkpoints.joinpath(*parts)
        return is_plain and folder.is_dir() and _has_something(folder)

    def __getitem__(self, name: str) -> ViewedRun:
        if name not in self:
            raise KeyError(name)
        folder = self._checkpoints / name
        return self._open(folder, stores_of(folder).get(folder.name), read_identity(folder))  # stages: own entries


def import_for_pages() -> None:
    """Import what tokens need, which takes seconds, so that the first page does not wait for it."""
    import transformers.tokenization_utils_tokenizers as transformers  # noqa: F401


def _has_something(folder: Path) -> bool:
    """True if there are samples or a database, which is not opened as all runs are listed, in a run's own folder."""
    return rollouts_dir(folder).is_dir() or (runs_in(folder) == [folder] and bool(databases_in(folder / "buffer")))


def viewed_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, ViewedRun]:
    """The run in `folder`, or the stages of the pipeline in it, by name. Raises DataError if nothing is to be shown."""
    root = folder.resolve()
    stores = stores_of(root, config, overrides, url) if root.is_dir() else {}
    sampled = {run.name for run in [root, *runs_in(root)] if rollouts_dir(run).is_dir()}
    if not stores and not sampled:
        stored_runs(folder)  # raises for a folder that is no run
        raise DataError(
            f"{folder} has neither an experience store nor sampled rollouts: give --config or --store if its store is "
            "elsewhere",
            key=str(folder),
        )
    return {name: ViewedRun(root.parent / name, stores.get(name)) for name in sorted({*stores, *sampled})}
