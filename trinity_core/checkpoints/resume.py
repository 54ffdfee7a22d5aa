"""Finds the checkpoint that a run resumes from, and reads and writes the run's side files."""

from __future__ import annotations

import glob
import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

from trinity_core.checkpoints.manifest import damage
from trinity_core.files import write_atomically, write_json
from trinity_core.layout import JobLayout, as_layout

log = logging.getLogger(__name__)

CLAIM = ".begun_by"
"""A file in an experiment's folder that names the flow run which created the folder."""


def latest_whole(job_dir: JobLayout | Path | str) -> int | None:
    """The newest step whose checkpoint is whole by content; None without one.

    A damaged checkpoint is left in place with a warning, and the previous one is used. The file
    `latest_checkpointed_iteration.txt` is for people and other tools and is not read.
    """
    layout = as_layout(job_dir)
    for step in reversed(layout.steps()):
        wrong = damage(layout.step(step))
        if wrong is None:
            return step
        if _is_meant_as_checkpoint(layout, step):
            log.warning("the checkpoint %s is skipped: %s", layout.step(step), wrong)
    return None


def whole_steps(job_dir: JobLayout | Path | str) -> list[int]:
    """Steps with a whole checkpoint, ascending; sizes are compared, contents are not."""
    layout = as_layout(job_dir)
    return [step for step in layout.steps() if damage(layout.step(step), deep=False) is None]


def _is_meant_as_checkpoint(layout: JobLayout, step: int) -> bool:
    """True if the folder holds more than published weights."""
    return any(layout.actor(step).glob("*_world_size_*")) or (layout.step(step) / "manifest.json").exists()


def fresh_name(root: Path, name: str, attempt_of: str = "", now: datetime | None = None) -> str:
    """The experiment name if `continue_from_checkpoint` is false: `name`, or `<name>_<timestamp>` if that is taken.

    `root` is the project's folder; empty folders in it do not count as taken. `attempt_of` names the flow run that
    starts the experiment: a retry of it gets the folder that the first attempt `claim`ed.
    """
    mine = f"{name} {attempt_of}"
    for claim in root.glob(f"{glob.escape(name)}*/{CLAIM}") if attempt_of else ():
        if claim.read_text() == mine:
            return claim.parent.name
    taken = root / name
    if not taken.is_dir() or not any(taken.iterdir()):
        return name
    fresh = f"{name}_{(now or datetime.now()).strftime('%Y%m%d%H%M%S')}"
    number = 2
    while (root / fresh).exists():
        fresh = f"{fresh.removesuffix(f'_{number - 1}')}_{number}"
        number += 1
    return fresh


def claim(folder: Path, name: str, attempt_of: str) -> None:
    """Record in the experiment's new folder which flow run created it, for `fresh_name`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CLAIM, f"{name} {attempt_of}".encode())


def model_name(model_path: str) -> str:
    """The name of a starting model in a run's files: the absolute path of a folder, or a hub model's name."""
    return str(Path(model_path).resolve()) if Path(model_path).exists() else model_path


def other_beginning(job_dir: JobLayout | Path | str, model_path: str) -> str | None:
    """The model that the run's checkpoints started from, if it is not `model_path`; else None."""
    began = read_meta(as_layout(job_dir).trainer_meta).get("model")
    return began if began not in (None, model_name(model_path)) else None


def read_meta(path: Path) -> dict[str, Any]:
    """`explorer_meta.json` or `trainer_meta.json`; empty if it is missing or unreadable (it can be rebuilt)."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is not readable and is ignored: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def update_meta(path: Path, **values: Any) -> dict[str, Any]:
    """Merge `values` into the file atomically; return the merged contents."""
    merged = {**read_meta(path), **values}
    write_json(path, merged, durable=False)
    return merged
