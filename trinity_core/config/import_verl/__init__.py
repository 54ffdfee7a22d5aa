"""veRL's command lines and Hydra files as configurations here: `trinity import-verl`.

Read (`shell`, `verl_settings`) to flat keys; mapped (`counterparts` is the table) into a draft; written as YAML with
the origin of each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_core.config.import_verl.commented import commented_yaml, left_out_lines
from trinity_core.config.import_verl.draft import Draft
from trinity_core.config.import_verl.rl_run import write_reinforced
from trinity_core.config.import_verl.sft_run import write_supervised
from trinity_core.config.import_verl.verl_settings import read_verl


@dataclass(frozen=True)
class ImportedConfig:
    """A veRL run as a configuration."""

    text: str
    """YAML, with veRL's words in the comments."""
    left_out: tuple[str, ...]
    """What has no counterpart here, with the reasons; lines of text, as they also stand in the file."""


def import_verl(path: Path, arguments: Sequence[str] = ()) -> ImportedConfig:
    """The configuration that a veRL script or YAML file stands for.

    `arguments` are those of the script, or further overrides (`key=value`). Raises ConfigError if the file cannot be
    read or starts no veRL training.
    """
    draft = Draft(read_verl(path, arguments))
    for text in draft.verl.remarks:
        draft.remark(text.rstrip("."))
    (write_supervised if draft.verl.is_sft else write_reinforced)(draft)
    return ImportedConfig(commented_yaml(draft, path.name), tuple(left_out_lines(draft)))


__all__ = ["ImportedConfig", "import_verl"]
