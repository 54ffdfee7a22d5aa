"""What `trinity import-verl` does: import, write, and look at the result as `trinity validate --offline` would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trinity_core.config.import_verl import ImportedConfig, import_verl
from trinity_core.config.load import config_from_text
from trinity_core.config.problems import ConfigError
from trinity_core.errors import TrinityError


def import_to(file: Path, arguments: Sequence[str], out: Path | None) -> tuple[ImportedConfig, str]:
    """The imported configuration, written to `out` if that is given, and what a run of it would be refused for.

    Raises ConfigError if `file` is no veRL run, TrinityError if `out` is there already or cannot be written.
    """
    imported = import_verl(file, arguments)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as written:
                written.write(imported.text)
        except FileExistsError:
            raise TrinityError(f"--out: {out} is there already; give another name, or remove it.") from None
        except OSError as error:
            raise TrinityError(f"--out: {out} cannot be written: {error.strerror}.") from None
    return imported, _problems(imported.text)


def _problems(text: str) -> str:
    try:
        config_from_text(text)
    except ConfigError as error:
        return str(error)
    return ""
