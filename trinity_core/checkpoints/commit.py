"""Commits checkpoints atomically: written to a temporary sibling, flushed, renamed, and only then named the latest.

    folder = begin(layout, step)         # a temporary sibling
    ...                                  # every rank writes its files into it
    commit(layout, step, folder, keep=3)

A run that dies at any point leaves the previous checkpoint intact and a temporary folder that the next `begin` removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from trinity_core.checkpoints.manifest import Entry, write_manifest
from trinity_core.files import (
    CHANGING_FOLDERS,
    clear_errors,
    remove_leftovers,
    remove_tree,
    sync_file,
    temporary_sibling,
    when_room,
    write_atomically,
)
from trinity_core.layout import MANIFEST, JobLayout

PUBLISHED = ("actor/weights.safetensors", "actor/weights.json")
"""Published weights in this step's folder; they are kept when the full checkpoint replaces the folder."""


def begin(layout: JobLayout, step: int) -> Path:
    """A new temporary folder for the checkpoint of `step`; leftovers of killed writers are removed first."""
    with clear_errors("making a checkpoint in", layout.root):
        layout.root.mkdir(parents=True, exist_ok=True)
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
    `write_manifest`. Raises `TrinityError` if the disk is full or not writable; the previous checkpoint then stays the
    latest.
    """
    target = layout.step(step)
    with clear_errors("writing the checkpoint", target):
        write_manifest(temporary, step, written)
        _sync_tree(temporary)
        old = None
        with CHANGING_FOLDERS:
            _carry_over(target, temporary)  # after the manifest: removing published weights leaves it whole
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

    Published weights in their folders stay, as long as they are loadable (`sync.checkpoint` removes them).
    Checkpoints after step `upto` neither count nor are deleted: they are damaged, and the run resumed from before them.
    """
    finished = [step for step in layout.steps() if step <= upto and (layout.step(step) / MANIFEST).exists()]
    gone = [step for step in finished[: -max(keep, 1)] if step not in protect]
    for step in gone:
        with CHANGING_FOLDERS:
            if (layout.step(step) / PUBLISHED[-1]).exists():
                _remove_all_but_published(layout.step(step))
            else:
                remove_tree(layout.step(step))
    return gone


def _remove_all_but_published(folder: Path) -> None:
    """Delete a checkpoint whose step is also a version that explorers may load; the manifest goes first."""
    with clear_errors("removing", folder):
        (folder / MANIFEST).unlink()
        kept = {folder / name for name in PUBLISHED}
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):  # the folder of the published weights is not empty
                    path.rmdir()
            elif path not in kept:
                path.unlink()


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
