"""Converts veRL's command lines and Hydra files to configurations: `trinity import-verl`.

`shell` and `verl_settings` read them into flat keys. The table of foreign keys, and the rules for keys that must be
combined (`rl_run`, `sft_run`), map them to a draft, which is written as YAML with the origin of each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_core.config.findings import ConfigError
from trinity_core.config.load import config_from_text
from trinity_core.errors import TrinityError
from trinity_core.import_verl.draft import Draft, commented_yaml, left_out_lines
from trinity_core.import_verl.rl_run import write_reinforced
from trinity_core.import_verl.sft_run import write_supervised
from trinity_core.import_verl.verl_settings import read_verl


@dataclass(frozen=True)
class ImportedConfig:
    """A veRL run as a configuration."""

    text: str
    """YAML, with veRL's keys in the comments."""
    left_out: tuple[str, ...]
    """Settings without a counterpart, with reasons; lines of text that are also in the file."""


def import_verl(path: Path, arguments: Sequence[str] = ()) -> ImportedConfig:
    """Convert a veRL script or YAML file.

    `arguments` are the script's, or further overrides (`key=value`). Raises ConfigError if the file cannot be read or
    starts no veRL training.
    """
    draft = Draft(read_verl(path, arguments))
    for text in draft.verl.remarks:
        draft.remark(text.rstrip("."))
    (write_supervised if draft.verl.is_sft else write_reinforced)(draft)
    return ImportedConfig(commented_yaml(draft, path.name), tuple(left_out_lines(draft)))


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
            raise TrinityError(f"--out: {out} already exists; give another name, or remove it.") from None
        except OSError as error:
            raise TrinityError(f"--out: {out} cannot be written: {error.strerror}.") from None
    return imported, _problems(imported.text)


def _problems(text: str) -> str:
    try:
        config_from_text(text)
    except ConfigError as error:
        return str(error)
    return ""


__all__ = ["ImportedConfig", "import_to", "import_verl"]
