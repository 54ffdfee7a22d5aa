"""What people write about a run, kept in its folder; and its removal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import private_folder, read_json, remove_tree, write_json
from trinity_core.base.layout import JobLayout
from trinity_core.base.runlock import components, is_held


@dataclass(frozen=True, slots=True)
class Note:
    text: str = ""
    archived: bool = False
    """True if the list of runs leaves it out."""

    @classmethod
    def of(cls, folder: Path) -> Note:
        return cls(**read_json(JobLayout(folder).note))

    def save(self, folder: Path) -> None:
        """Write the note. Raises OSError."""
        private_folder(JobLayout(folder).monitor)
        write_json(JobLayout(folder).note, asdict(self))


def delete(folders: Iterable[Path]) -> None:
    """Remove the folders of runs, and the links to them. Raises OSError. Raises TrinityError, before anything is
    removed, if a process works on one of them."""
    present = [folder for folder in folders if folder.exists()]
    for folder in present:
        if any(is_held(folder, component) for component in components(folder)):
            raise TrinityError(f"{folder} is in use: cancel the run first")
    for folder in present:
        remove_tree(folder.resolve())
        if folder.is_symlink():
            folder.unlink()
