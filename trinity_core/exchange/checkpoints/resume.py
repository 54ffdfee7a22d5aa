"""Finds the checkpoint that a run resumes from, and writes the run's side files."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trinity_core.base.errors import DataError, TransientFault
from trinity_core.base.files import private_folder, read_json, write_atomically, write_json
from trinity_core.base.layout import ABANDONED, MANIFEST, JobLayout
from trinity_core.base.runlock import PIPELINE, is_held, lock_path, one_at_a_time
from trinity_core.exchange.checkpoints.commit import damage

log = logging.getLogger(__name__)

CLAIM = ".begun_by"
"""A file in an experiment's folder that names the flow run that created the folder."""


def latest_whole(job_dir: Path) -> int | None:
    """Return the newest step whose checkpoint is intact, or None.

    Damaged checkpoints are left in place with a warning, and the previous one is used (see `abandon_after`). Raises
    DataError for a checkpoint in another release's format, and TransientFault if a file stays unreadable.
    `latest_checkpointed_iteration.txt` is for people and other tools and is not read.
    """
    layout = JobLayout(job_dir)
    for step in reversed(layout.steps()):
        wrong = damage(layout.step(step))
        if wrong is None:
            return step
        if _is_meant_as_checkpoint(layout, step):
            log.warning("the checkpoint %s is skipped: %s", layout.step(step), wrong)
    return None


def abandon_after(job_dir: Path, step: int) -> None:
    """Mark the checkpoints after `step` as abandoned: they are damaged, and the run goes back to `step`.

    Call it before anything else is rewound. A missing file may reappear, and that checkpoint must not be combined with
    batches drawn since.
    """
    layout = JobLayout(job_dir)
    for later in layout.steps():
        mark = layout.step(later) / ABANDONED
        if later > step and _is_meant_as_checkpoint(layout, later) and not mark.exists():
            write_atomically(mark, f"The run went back to step {step} and continues from there.\n".encode())
            log.warning("the checkpoint %s is abandoned: the run continues from step %d", mark.parent, step)


def whole_steps(job_dir: Path, or_unreadable: bool = False) -> list[int]:
    """Return the steps with a complete checkpoint, ascending. Compares sizes, not contents.

    Those of another format are left out, and unreadable ones unless `or_unreadable`: they may be whole, so whoever
    decides which checkpoints stay must count them.
    """
    layout = JobLayout(job_dir)
    return [step for step in layout.steps() if _is_whole(layout.step(step), or_unreadable)]


def _is_whole(folder: Path, or_unreadable: bool) -> bool:
    try:
        return damage(folder, deep=False) is None
    except TransientFault:
        return or_unreadable
    except DataError as error:
        log.warning("the checkpoint %s is not listed: %s", folder, error)
        return False


def _is_meant_as_checkpoint(layout: JobLayout, step: int) -> bool:
    """True if the folder holds more than published weights."""
    return any(layout.actor(step).glob("*_world_size_*")) or (layout.step(step) / MANIFEST).exists()


def claimed(root: Path, name: str, attempt_of: str) -> str:
    """Return the folder name that an attempt of this flow run has claimed for the experiment, or ""."""
    claims = root.glob(f"{glob.escape(name)}*/{CLAIM}") if attempt_of else ()
    return next((claim.parent.name for claim in claims if claim.read_text() == f"{name} {attempt_of}"), "")


def fresh_name(
    root: Path, name: str, attempt_of: str = "", now: datetime | None = None, stages: Sequence[str] = ()
) -> str:
    """Return the experiment name if `continue_from_checkpoint` is false: `name`, or `<name>_<timestamp>` if that is
    taken.

    `root` is the project's folder. Empty folders, and those of a refused pipeline start, do not count as taken. A
    pipeline's name is also taken if the folder of one of its `stages` (name suffixes such as `_sft`) is. `attempt_of`
    names the flow run that starts the experiment: its retries get the folder that the first attempt claimed.
    """
    if mine := claimed(root, name, attempt_of):
        return mine
    if not any(_is_taken(root / f"{name}{stage}") for stage in ("", *stages)):
        return name
    fresh = f"{name}_{(now or datetime.now()).strftime('%Y%m%d%H%M%S')}"
    number = 2
    while (root / fresh).exists():
        fresh = f"{fresh.removesuffix(f'_{number - 1}')}_{number}"
        number += 1
    return fresh


def _is_taken(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return not names <= {lock_path(folder, PIPELINE).name} or is_held(folder, PIPELINE)


def fresh_folder(root: Path, name: str, attempt_of: str, stages: Sequence[str] = ()) -> str:
    """Create and claim the folders of `fresh_name` and its stages, and return the name.

    Parts of one run that call this at the same time get the same folder.
    """
    with one_at_a_time(root / f".{name}.lock"):
        fresh = fresh_name(root, name, attempt_of, stages=stages)
        if not (root / fresh / CLAIM).exists():
            for stage in ("", *stages):
                claim(root / f"{fresh}{stage}", f"{name}{stage}", attempt_of)
    return fresh


def newest_run(root: Path, name: str, stage: str = "") -> str:
    """Return the name of the newest run begun under `name` in a fresh folder, or `name` if there is none.

    With `stage`, such as `_sft`, look for that stage of a pipeline called `name`, which may also run alone. Folders of
    refused starts, without identity, stages and checkpoints, are ignored.
    """
    time = r"(_\d{14}(_\d+)?)?"
    pattern = re.compile(re.escape(name) + time + (re.escape(stage) + time if stage else ""))
    claims = [path for path in root.glob(f"{glob.escape(name)}*/{CLAIM}") if pattern.fullmatch(path.parent.name)]
    for path in sorted(claims, key=lambda claimed: claimed.stat().st_mtime, reverse=True):
        layout = JobLayout(path.parent)
        if layout.identity.exists() or layout.stages.exists() or layout.steps():
            return path.parent.name
    return name + stage


def claim(folder: Path, name: str, attempt_of: str) -> None:
    """Record in an experiment's new folder which flow run created it."""
    private_folder(folder)
    write_atomically(folder / CLAIM, f"{name} {attempt_of}".encode())


def update_meta(path: Path, /, **values: Any) -> dict[str, Any]:
    merged = {**read_json(path), **values}
    write_json(path, merged, durable=False)
    return merged
