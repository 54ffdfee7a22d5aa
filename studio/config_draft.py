"""A configuration while it is edited: its YAML text, and the file that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studio.commented_yaml import changed
from trinity_core.config import ConfigError
from trinity_core.config.source import parse
from trinity_core.files import write_atomically

LISTED_DEPTH = 3
"""Folders below the root in which YAML files are looked for."""
MOST_LISTED = 300
UNLISTED = ("prefect.yaml", "checkpoints", "runs", "node_modules")
"""Files that are no configurations, and folders that hold none."""


@dataclass(slots=True)
class ConfigDraft:
    """The text of a configuration. Comments, order and quotes stay as they are where nothing is changed."""

    file: Path
    text: str = ""
    saved: str = ""
    """What the file holds."""

    @classmethod
    def opened(cls, file: Path) -> ConfigDraft:
        """The draft of a file, empty where that is not there yet. Raises OSError, UnicodeDecodeError."""
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return cls(file, text, text)

    @property
    def is_saved(self) -> bool:
        """True if the file holds this text."""
        return self.text == self.saved

    def tree(self) -> Mapping[str, Any]:
        """The keys as a tree of plain values. Raises ConfigError where the text is no YAML of keys."""
        return parse(self.text, self.file.name).valid_tree() if self.text.strip() else {}

    def value(self, key: str) -> Any:
        """The value at a dotted key, None where it is not given. Raises ConfigError as `tree`."""
        return value_at(self.tree(), key)

    def change(self, key: str, value: Any) -> None:
        """Write `value` at a dotted key; None takes the key away. Raises as `commented_yaml.changed`."""
        self.text = changed(self.text, key, value)

    def lost_keys(self, file: Path) -> list[str]:
        """The dotted keys that a file has and this text has not. Raises ConfigError as `tree`."""
        try:
            there = ConfigDraft.opened(file).tree()
        except (OSError, UnicodeDecodeError, ConfigError):
            return []  # nothing that could be read is lost
        kept = set(_keys(self.tree()))
        return [key for key in _keys(there) if key not in kept]

    def save(self, file: Path | None = None) -> None:
        """Write the file, or another one, which is then the draft's. Raises OSError."""
        target = file or self.file
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, self.text.encode())
        self.file, self.saved = target, self.text


def _keys(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{above}{name}"
        yield from _keys(value, f"{key}.") if isinstance(value, Mapping) and value else [key]


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None where it is not given."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def yaml_files(root: Path) -> list[Path]:
    """YAML files below a folder, as paths relative to it: those of the folder itself first."""
    found = sorted(_yaml_files(root, LISTED_DEPTH), key=lambda path: (len(path.parts), path))
    return [path.relative_to(root) for path in found[:MOST_LISTED]]


def _yaml_files(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in UNLISTED:
            continue
        if path.is_dir() and depth and not path.is_symlink():
            yield from _yaml_files(path, depth - 1)
        elif path.suffix in (".yaml", ".yml") and path.is_file():
            yield path
