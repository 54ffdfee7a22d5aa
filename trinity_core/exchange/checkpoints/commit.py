"""Commits checkpoints atomically: written to a temporary sibling, flushed, renamed, and only then named the latest.

folder = begin(layout, step)         # a temporary sibling
    ...                                  # every rank writes its files into it
    commit(layout, step, folder, keep=3)

A run that dies at any point leaves the previous checkpoint intact and a temporary folder that the next `begin` removes.
`manifest.json` has sizes and SHA-256 of all files except those below `huggingface`, which a later conversion completes
and which can be recreated from a base model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.base.files import (
    CHANGING_FOLDERS,
    clear_errors,
    file_digest,
    private_folder,
    remove_leftovers,
    remove_tree,
    sync_file,
    temporary_sibling,
    when_room,
    write_atomically,
    write_json,
)
from trinity_core.base.layout import ABANDONED, MANIFEST, JobLayout
from trinity_core.base.waits import retry

PUBLISHED = ("actor/weights.safetensors", "actor/weights.json")
"""Published weights in this step's folder, kept when the full checkpoint replaces the folder."""
Entry = dict[str, int | str]
"""Manifest entry of a file: `size` in bytes, `sha256`."""
FORMAT = 1
"""Format of `manifest.json`. Raised whenever older releases could no longer resume from what is written."""
READ_SECONDS = 60.0
"""Time for a file to become readable again."""
MISSING = (FileNotFoundError, NotADirectoryError)
T = TypeVar("T")
HASH_THREADS = 4
"""Number of hashing threads; hashlib releases the GIL."""


def files_of(folder: Path) -> list[Path]:
    """Return the relative paths of the files below `folder` that the manifest lists, sorted."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != Path(MANIFEST) and "huggingface" not in name.parts)


def entry_of(path: Path) -> Entry:
    return {"size": path.stat().st_size, "sha256": file_digest(path)}


def write_manifest(folder: Path, step: int, written: Mapping[str, Entry] | None = None) -> None:
    """Write the manifest of `folder`, which completes the checkpoint.

    `written` holds entries that the files' writers have computed. Raises TrinityError if such a file is missing.
    """
    manifest, names = dict(written or {}), files_of(folder)
    if lost := sorted(manifest.keys() - {name.as_posix() for name in names}):
        raise TrinityError(
            f"{folder} lacks {lost[0]}, which a trainer worker has written: checkpoint_root_dir must be a folder that "
            "all nodes share"
        )
    others = [name for name in names if name.as_posix() not in manifest]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        entries = list(pool.map(lambda name: entry_of(folder / name), others))
    manifest |= {name.as_posix(): entry for name, entry in zip(others, entries, strict=True)}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": dict(sorted(manifest.items()))})


def damage(folder: Path, deep: bool = True) -> str | None:
    """Return why the checkpoint in `folder` must not be used, or None. `deep` compares contents, not only sizes.

    Files that are not in the manifest (a converted model, published weights) are ignored. Raises DataError for a
    checkpoint of another `FORMAT`, which may be complete for the release that wrote it. Raises TransientFault if a file
    is unreadable, which says nothing about the checkpoint; with `deep`, only after waiting for the file.
    """
    seconds = READ_SECONDS if deep else 0.0
    if _when_readable(folder / ABANDONED, Path.exists, seconds):
        return "the run went back to an earlier one and continued from there"
    try:
        manifest = json.loads(_when_readable(folder / MANIFEST, Path.read_text, seconds))
        _refuse_other_format(folder / MANIFEST, manifest.get("format", FORMAT))
        files: dict[str, dict[str, str | int]] = manifest["files"]
        listed = [(folder / name, int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()]
    except MISSING:
        return f"it has no {MANIFEST}: it was never finished"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read ({error!r})"
    try:
        for path, size, _ in listed:
            actual = _when_readable(path, Path.stat, seconds).st_size
            if actual != size:
                return f"{path.relative_to(folder)} has {actual} bytes instead of {size}"
        return _changed(folder, listed) if deep else None
    except MISSING as error:
        return f"a file is missing: {error.filename}"


def _refuse_other_format(manifest: Path, written: object) -> None:
    if written != FORMAT:
        raise DataError(
            f"{manifest} was written by another release, in format {written}; this one reads format {FORMAT}: continue "
            "with the release that wrote it. To go back to the checkpoint before it, remove its folder",
            key=str(manifest),
        )


def _changed(folder: Path, listed: Sequence[tuple[Path, int, str]]) -> str | None:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        digests = list(pool.map(lambda entry: _when_readable(entry[0], file_digest, READ_SECONDS), listed))
    for (path, _, expected), actual in zip(listed, digests, strict=True):
        if actual != expected:
            return f"{path.relative_to(folder)} has changed since it was written"
    return None


def _when_readable(path: Path, read: Callable[[Path], T], seconds: float) -> T:
    """Return `read(path)`. An unreadable file may be intact, with its disk or server temporarily away.

    Raises one of `MISSING`, or TransientFault after `seconds`.
    """

    def is_away(error: Exception) -> bool:
        return isinstance(error, OSError) and not isinstance(error, MISSING)

    try:
        return retry(partial(read, path), is_away, seconds, pause=1.0, notice=f"{path} cannot be read")
    except MISSING:
        raise
    except OSError as error:
        raise TransientFault(
            f"{path} cannot be read ({error}), so it is unknown whether its checkpoint is whole. Make it readable; to "
            "resume from the checkpoint before it, remove its checkpoint's folder"
        ) from error


def begin(layout: JobLayout, step: int) -> Path:
    """Create a temporary folder for the checkpoint of `step`, after removing leftovers of killed writers."""
    with clear_errors("making a checkpoint in", layout.root):
        private_folder(layout.root)
        remove_leftovers(layout.root, "global_step_*")
        temporary = temporary_sibling(layout.step(step))
        when_room(temporary.mkdir, temporary)
    return temporary


def commit(
    layout: JobLayout, step: int, temporary: Path, keep: int | None = None, protect: Collection[int] = (),
    written: Mapping[str, Entry] | None = None,
) -> Path:  # fmt: skip
    """Make `temporary` the checkpoint of `step` and the latest one; return its folder.

    Of the checkpoints up to `step`, the newest `keep` (None: all) and those in `protect` stay. `written` as for
    `write_manifest`. Raises TrinityError if the disk is full or not writable; the previous checkpoint then stays the
    latest.
    """
    target = layout.step(step)
    with clear_errors("writing the checkpoint", target):
        write_manifest(temporary, step, written)
        _sync_tree(temporary)
        old = None
        with CHANGING_FOLDERS:
            _carry_over(target, temporary)  # after the manifest, which does not list them
            if target.exists():
                old = temporary_sibling(target)
                target.rename(old)
            temporary.rename(target)
        sync_file(layout.root)
        write_atomically(layout.latest_checkpoint, f"{step}\n".encode())
        if old is not None:
            shutil.rmtree(old)
    if keep is not None:
        remove_old(layout, step, keep, protect)
    return target


def remove_old(layout: JobLayout, upto: int, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Delete committed checkpoints except the newest `keep` (at least one) and those in `protect`; return their steps.

    Published weights in their folders stay while they are loadable (`sync.checkpoint` removes them). Checkpoints after
    step `upto` are damaged (the run resumed from before them): they neither count nor are deleted. Abandoned ones do
    not count either; they are deleted with the checkpoints before the oldest kept one.
    """
    finished = [step for step in layout.steps() if step <= upto and (layout.step(step) / MANIFEST).exists()]
    usable = [step for step in finished if not (layout.step(step) / ABANDONED).exists()]
    oldest = min(usable[-max(keep, 1) :], default=0)
    gone = [step for step in finished if step < oldest and step not in protect]
    for step in gone:
        with CHANGING_FOLDERS:
            if (layout.step(step) / PUBLISHED[-1]).exists():
                _remove_all_but_published(layout.step(step))
            else:
                remove_tree(layout.step(step))
    return gone


def _remove_all_but_published(folder: Path) -> None:
    """Delete a checkpoint whose step is also a version that explorers may load, the manifest first.

    Another process that converts it may remove or complete its own files meanwhile.
    """
    with clear_errors("removing", folder):
        (folder / MANIFEST).unlink()
        kept = {folder / name for name in PUBLISHED}
        for current, folders, files in os.walk(folder, topdown=False):
            links = [name for name in folders if Path(current, name).is_symlink()]
            for path in {Path(current, name) for name in files + links} - kept:
                path.unlink(missing_ok=True)
            for name in folders:
                with suppress(OSError):  # the folder of the published weights is not empty
                    Path(current, name).rmdir()


def _carry_over(target: Path, temporary: Path) -> None:
    for name in PUBLISHED:
        source, copy = target / name, temporary / name
        if source.exists() and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, copy)
            except OSError:  # a file system without hard links
                when_room(lambda: shutil.copyfile(source, copy), copy)  # noqa: B023 - called at once
                sync_file(copy)
            sync_file(copy.parent)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync_file(path)
