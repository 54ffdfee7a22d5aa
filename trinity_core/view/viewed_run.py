"""A run as the page sees it: its store, its tokenizer and algorithm, its samples on disk. Nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from sqlalchemy import Connection, select

from trinity_core.checkpoints.resume import read_meta
from trinity_core.config import stages, to_dict
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.errors import DataError
from trinity_core.layout import JobLayout
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.run_stores import open_store, runs_in, stores_of
from trinity_core.store.database import Database
from trinity_core.store.schema import Tables
from trinity_core.tracking.rollouts import rollouts_dir
from trinity_core.view.advantages_shown import GroupAdvantages, group_advantages

log = logging.getLogger(__name__)


class ViewedRun:
    """One run. Used by several threads."""

    def __init__(self, folder: Path, store: str | None, settings: Mapping[str, Any] | None = None) -> None:
        """`store` is the URL of its store, if it has one; `settings` its configuration, if it is known."""
        self.folder = folder
        self.layout = JobLayout(folder)
        self._settings = settings or {}
        self._database: Database | None = open_store(folder, store) if store else None
        self._lock = Lock()
        self.advantages = lru_cache(maxsize=8)(self._advantages)
        """Of a group, by its id: computed once."""

    @property
    def has_store(self) -> bool:
        """True if there are experiences to ask for."""
        return self._database is not None

    @contextmanager
    def read(self) -> Iterator[tuple[Connection, Tables]]:
        """A short read transaction. Raises DataError if the run has no store."""
        if self._database is None:
            raise DataError(f"{self.folder.name} has no experience store")
        with self._database.read() as connection:
            yield connection, self._database.tables

    def experiences(self, group_id: int) -> list[Experience]:
        """The stored experiences of a group; none if they have left the store."""
        with self.read() as (connection, t):
            blob = connection.scalar(select(t.experiences.c.blob).where(t.experiences.c.group_id == group_id))
        return [] if blob is None else from_bytes(blob)

    def _advantages(self, group_id: int) -> GroupAdvantages:
        experiences = self.experiences(group_id)
        if not experiences:
            return GroupAdvantages(None, "")
        algorithm = self._settings.get("algorithm") or read_meta(self.layout.trainer_meta).get("algorithm")
        return group_advantages(experiences, algorithm)

    @property
    def tokenizer(self) -> Any:
        """The policy's; None if it cannot be found, then there are only ids."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        for path in self._model_paths():
            try:
                return load_tokenizer(path)
            except (OSError, ValueError) as error:
                log.warning("%s has no tokenizer that can be loaded: %s", path, error)
        return None

    def _model_paths(self) -> Iterator[str]:
        """Local folders and hub names in which the tokenizer may be, the surest first."""
        model = self._settings.get("model", {}).get("model_path")
        meta = read_meta(self.layout.trainer_meta)
        folders = [str(self.layout.huggingface(step)) for step in reversed(self.layout.steps())]
        for path in (model, *folders, meta.get("tokenizer"), meta.get("model")):
            if path and (not path.startswith(("/", ".")) or Path(path, "tokenizer_config.json").is_file()):
                yield path


def viewed_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, ViewedRun]:
    """The run in `folder`, or the stages of the pipeline in it, by name. Raises DataError if nothing is to be shown."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    folder = folder.resolve()
    stores = stores_of(folder, config, overrides, url)
    sampled = {run.name for run in [folder, *runs_in(folder)] if rollouts_dir(run).is_dir()}
    if not stores and not sampled:
        raise DataError(
            f"{folder} has neither an experience store nor sampled rollouts: give the folder of a run, "
            "<checkpoint_root_dir>/<project>/<name>, and --config or --store if its store is elsewhere"
        )
    settings = {} if config is None else {each.name: to_dict(each) for each in stages(load_checked(config, overrides))}
    only = next(iter(settings.values())) if len(settings) == 1 else None
    return {
        name: ViewedRun(folder.parent / name, stores.get(name), settings.get(name, only))
        for name in sorted({*stores, *sampled})
    }
