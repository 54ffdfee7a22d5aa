"""What the experience operators are given, as JSON lines (`save_input`): the steps that are stored, after any crash."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_core.config import Config
from trinity_core.config.paths import operator_input_file
from trinity_core.data.experience import Experience
from trinity_core.store.archive import Archive, whole_line


class OperatorInput:
    """The file of one explorer. A step is written before it is stored, and cut off again if that does not happen."""

    def __init__(self, config: Config) -> None:
        path = operator_input_file(config)
        self._archive = Archive(path, whole_line) if path else None
        """None: no file is wanted."""
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def resume(self, step: int) -> None:
        """Cut the file after `step`, the last one that is stored."""
        if self._archive is not None:
            self._archive.rewind(step)

    def append(self, step: int, experiences: Sequence[Experience]) -> None:
        """Append what the operators were given in this step."""
        if self._archive is not None:
            self._archive.extend(step, lambda each: experiences if each == step else ())
