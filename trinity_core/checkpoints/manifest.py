"""The manifest of a whole checkpoint: sizes and SHA-256 of its files, in `manifest.json`.

Folders named `huggingface` are not listed: a later conversion completes them, and their files can be made again from a
base model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trinity_core.errors import TrinityError
from trinity_core.files import write_json
from trinity_core.layout import MANIFEST

Entry = dict[str, int | str]
"""Of a file: `size` in bytes, `sha256`."""
FORMAT = 1
HASH_THREADS = 4
"""hashlib releases the interpreter lock, so files are hashed in parallel."""


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Relative paths of the files below `folder` that the manifest lists, sorted."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != Path(MANIFEST) and "huggingface" not in name.parts)


def entry_of(path: Path) -> Entry:
    """A file's entry in the manifest."""
    return {"size": path.stat().st_size, "sha256": digest(path)}


def write_manifest(folder: Path, step: int, written: Mapping[str, Entry] | None = None) -> None:
    """Write the manifest of `folder`, which then counts as a whole checkpoint.

    `written` are the entries of files whose writers have made them. Raises TrinityError if such a file is not there.
    """
    known, names = dict(written or {}), files_of(folder)
    if lost := sorted(known.keys() - {name.as_posix() for name in names}):
        raise TrinityError(
            f"{folder} lacks {lost[0]}, which a trainer worker has written: checkpoint_root_dir must be a folder that "
            "all nodes share"
        )
    others = [name for name in names if name.as_posix() not in known]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        entries = list(pool.map(lambda name: entry_of(folder / name), others))
    known |= {name.as_posix(): entry for name, entry in zip(others, entries, strict=True)}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": dict(sorted(known.items()))})


def damage(folder: Path, deep: bool = True) -> str | None:
    """A description of the damage to the checkpoint in `folder`, or None. `deep` compares contents, not only sizes.

    Files that the manifest does not list (a converted model, published weights) are ignored.
    """
    try:
        files: dict[str, dict[str, str | int]] = json.loads((folder / MANIFEST).read_text())["files"]
        listed = [(folder / name, int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()]
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was never finished"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    for path, size, _ in listed:
        try:
            found = path.stat().st_size
        except OSError:
            return f"{path.relative_to(folder)} is missing"
        if found != size:
            return f"{path.relative_to(folder)} has {found} bytes instead of {size}"
    return _changed(folder, listed) if deep else None


def _changed(folder: Path, listed: Iterable[tuple[Path, int, str]]) -> str | None:
    entries = list(listed)
    try:
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = list(pool.map(lambda entry: digest(entry[0]), entries))
    except OSError as error:
        return f"a file cannot be read ({error})"
    for (path, _, expected), found in zip(entries, digests, strict=True):
        if found != expected:
            return f"{path.relative_to(folder)} has changed since it was written"
    return None
