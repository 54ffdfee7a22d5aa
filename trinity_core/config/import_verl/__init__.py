"""Converts veRL's commands, scripts and Hydra files to configurations: `trinity import-verl`.

`read` reads them into flat keys. The table of foreign keys, and the rules for keys that must be combined
(`reinforced`, `supervised`), map them to a draft, which is written as YAML with the origin of each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_core.base.errors import TrinityError
from trinity_core.config.findings import ConfigError
from trinity_core.config.import_verl.draft import Draft
from trinity_core.config.import_verl.read import read_verl
from trinity_core.config.import_verl.reinforced import write_reinforced
from trinity_core.config.import_verl.supervised import write_supervised
from trinity_core.config.load import config_from_text


@dataclass(frozen=True)
class ImportedConfig:
    """A veRL run as a configuration."""

    text: str
    """YAML, with veRL's keys in the comments."""
    left_out: tuple[str, ...]
    """Settings without a counterpart, with reasons; lines of text that are also in the file."""


def import_verl(path: Path, arguments: Sequence[str] = ()) -> ImportedConfig:
    """Convert a veRL script with its arguments, a YAML file with overrides, or a command: its first word and the
    others. Raises ConfigError if it cannot be read or starts no veRL training."""
    draft = Draft(read_verl(path, arguments))
    (write_supervised if draft.verl.is_sft else write_reinforced)(draft)
    return ImportedConfig(draft.yaml(path.name if path.is_file() else "a command"), tuple(draft.left_out_lines()))


def import_to(file: Path, arguments: Sequence[str], out: Path | None) -> tuple[ImportedConfig, str]:
    """Return the imported configuration, written to `out` if given, and the problems that a run of it would have.

    Raises ConfigError if `file` is not a veRL run, TrinityError if `out` already exists or cannot be written.
    """
    imported = import_verl(file, arguments)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as written:
                written.write(imported.text)
        except FileExistsError:
            raise TrinityError(f"--out: {out} exists; remove it, or give another name.") from None
        except OSError as error:
            raise TrinityError(f"--out: {out} cannot be written: {error.strerror}.") from None
    try:
        config_from_text(imported.text, name=str(out or "<text>"))
    except ConfigError as error:
        return imported, str(error)
    return imported, ""


__all__ = ["ImportedConfig", "import_to", "import_verl"]
