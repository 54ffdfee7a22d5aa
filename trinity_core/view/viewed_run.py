"""A run as the page sees it: its store, tokenizer, algorithm and samples on disk. Read-only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import Connection, select

from trinity_core.base.errors import DataError, InputError
from trinity_core.base.layout import JobLayout
from trinity_core.config import AlgorithmConfig, stages, to_dict
from trinity_core.data.experience import Experience, from_bytes
from trinity_core.data.tokenizer import load_tokenizer
from trinity_core.exchange.checkpoints.resume import read_meta
from trinity_core.exchange.store.database import Database
from trinity_core.exchange.store.schema import Tables
from trinity_core.exchange.tracking.rollouts import rollouts_dir
from trinity_core.results.audit import open_store, runs_in, stores_of
from trinity_core.run.configuration import load_checked

if TYPE_CHECKING:
    from trinity_core.algorithms.objective import Objective

log = logging.getLogger(__name__)


class ViewedRun:
    """One run. Thread-safe."""

    def __init__(self, folder: Path, store: str | None, settings: Mapping[str, Any] | None = None) -> None:
        """`store` is the URL of its store, if it has one; `settings` its configuration, if known."""
        self.folder = folder
        self.layout = JobLayout(folder)
        self._settings = settings or {}
        self._database: Database | None = open_store(folder, store) if store else None
        self._lock = Lock()
        self.advantages = lru_cache(maxsize=8)(self._advantages)

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

    def _advantages(self, group_id: int) -> GroupAdvantages:
        experiences = self.experiences(group_id)
        if not experiences:
            return GroupAdvantages(None, "")
        algorithm = self._settings.get("algorithm") or read_meta(self.layout.trainer_meta).get("algorithm")
        return group_advantages(experiences, algorithm)

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; None if it cannot be found."""
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
        """Yield local folders and hub names that may hold the tokenizer, the most reliable first."""
        model = self._settings.get("model", {}).get("model_path")
        meta = read_meta(self.layout.trainer_meta)
        folders = [str(self.layout.huggingface(step)) for step in reversed(self.layout.steps())]
        for path in (model, *folders, meta.get("tokenizer"), meta.get("model")):
            if path and (not path.startswith(("/", ".")) or Path(path, "tokenizer_config.json").is_file()):
                yield path


class RunFolders(Mapping[str, ViewedRun]):
    """All runs in a folder of checkpoints, by `project/name`: looked up each time, opened on demand."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._open = lru_cache(maxsize=32)(self._opened)

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
        return self._open(name, stores_of(folder).get(folder.name))  # a pipeline's stages have their own entries

    def _opened(self, name: str, store: str | None) -> ViewedRun:
        return ViewedRun(self._checkpoints / name, store)


def import_for_pages() -> None:
    """Import what advantages and tokens need, which takes seconds, so that the first page does not wait for it."""
    import transformers.tokenization_utils_tokenizers as transformers  # noqa: F401

    import trinity_core.training.update as update  # noqa: F401


def _has_something(folder: Path) -> bool:
    """True if there are experiences or samples in a run's own folder."""
    return rollouts_dir(folder).is_dir() or (runs_in(folder) == [folder] and bool(stores_of(folder)))


def viewed_runs(
    folder: Path, config: Path | None = None, overrides: Sequence[str] = (), url: str | None = None
) -> dict[str, ViewedRun]:
    """The run in `folder`, or the stages of the pipeline in it, by name. Raises DataError if nothing is to be shown."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}", key=str(folder))
    folder = folder.resolve()
    stores = stores_of(folder, config, overrides, url)
    sampled = {run.name for run in [folder, *runs_in(folder)] if rollouts_dir(run).is_dir()}
    if not stores and not sampled:
        raise DataError(
            f"{folder} has neither an experience store nor sampled rollouts: give the folder of a run, "
            "<checkpoint_root_dir>/<project>/<name>, and --config or --store if its store is elsewhere",
            key=str(folder),
        )
    settings = (
        {} if config is None else {stage.name: to_dict(stage) for stage in stages(load_checked(config, overrides))}
    )
    only = next(iter(settings.values())) if len(settings) == 1 else None
    return {
        name: ViewedRun(folder.parent / name, stores.get(name), settings.get(name, only))
        for name in sorted({*stores, *sampled})
    }


PARTS = ("algorithm_type", "advantage_fn", "advantage_fn_args", "kl_penalty_fn", "kl_penalty_fn_args")
"""Settings of the algorithm section that determine the advantages."""


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of a group's rollouts, or None, and a sentence that says how they were computed or why they are
    missing."""

    values: Sequence[np.ndarray] | None
    """float32 [T] for each experience."""
    note: str


def group_advantages(experiences: Sequence[Experience], algorithm: Mapping[str, Any] | None) -> GroupAdvantages:
    """Compute the advantages of this group with the trainer's own function.

    The values are None if the function needs what the store does not hold (a critic's values, a reference model), or if
    the advantages also depend on the batch's other groups.
    """
    from trinity_core.algorithms.objective import Objective

    if algorithm is None:
        return GroupAdvantages(None, "Advantages: the run's folder does not say which algorithm; give --config.")
    name = algorithm.get("advantage_fn")
    if name in (None, "none"):
        return GroupAdvantages(None, f"Advantages: {algorithm.get('algorithm_type')} has none.")
    try:
        objective = Objective(AlgorithmConfig(**{key: algorithm[key] for key in PARTS if key in algorithm}))
        values = _computed(objective, experiences)
        beside_another = _computed(objective, [*experiences, *map(_another, experiences)])[: len(values)]
    except InputError as error:
        return GroupAdvantages(None, f"Advantages: '{name}' cannot be computed here: {error}")
    if not all(np.allclose(one, other, atol=1e-6) for one, other in zip(values, beside_another, strict=True)):
        return GroupAdvantages(None, f"Advantages: '{name}' depends on the whole batch, which is not kept together.")
    return GroupAdvantages(values, f"Advantages: computed by '{name}' from the rewards stored, as the trainer does.")


def _another(experience: Experience) -> Experience:
    """Return the same experience in another group and with another reward."""
    reward = None if experience.reward is None else 3.0 * experience.reward + 1.0 + experience.run
    return replace(experience, group=f"{experience.group} beside", reward=reward)


def _computed(objective: Objective, experiences: Sequence[Experience]) -> list[np.ndarray]:
    import torch

    from trinity_core.training.batch import make_batch
    from trinity_core.training.update import prepare

    batch = make_batch(experiences, torch.device("cpu"), objective.needs_of_rows)
    prepared, _ = prepare(objective, batch, None, None, None)
    rows = prepared.advantages.float().numpy()
    return [row[: experience.response_length] for row, experience in zip(rows, experiences, strict=True)]
