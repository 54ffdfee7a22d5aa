"""What an explorer stored as JSON lines too, with `storage_type: file`: the same steps after any crash."""

from __future__ import annotations

from functools import partial

from trinity_core.config import Config
from trinity_core.config.paths import explored_file
from trinity_core.store.archive import Archive, whole_line
from trinity_core.store.store import ExperienceStore


class ExploredFile:
    """The file of one explorer. Its lines are read back from the store, so that they are what was stored."""

    def __init__(self, config: Config, store: ExperienceStore) -> None:
        path = explored_file(config)
        self._archive = Archive(path, whole_line) if path else None
        """None: no file is wanted."""
        self._explored = partial(store.explored, config.explorer.name)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None:
        """Make the file that of the explore steps up to `step`, whatever became of it."""
        if self._archive is not None:
            self._archive.rewind(step)
            self.stored(step)

    def stored(self, step: int) -> None:
        """Append the steps up to `step`."""
        if self._archive is not None:
            self._archive.extend(step, self._explored)
