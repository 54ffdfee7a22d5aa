"""Which checkpoint a run goes on from, and what its side files say."""

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
"""A file of an experiment's folder that names what has begun it."""


def latest_whole(job_dir: JobLayout | Path | str) -> int | None:
    """The newest step whose checkpoint is whole, contents compared; None where there is none.

    A damaged one is left where it is, with a warning, in favour of the one before. `latest_checkpointed_iteration.txt`
    is for people and other tools: it is not needed to find a checkpoint, and a wrong one does no harm.
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
    """Not just weights that were handed over through the folder."""
    return any(layout.actor(step).glob("*_world_size_*")) or (layout.step(step) / "manifest.json").exists()


def fresh_name(root: Path, name: str, attempt_of: str = "", now: datetime | None = None) -> str:
    """The experiment name where `continue_from_checkpoint` is false: `name`, or `<name>_<timestamp>` where it is taken.

    `root` is the folder of the project; a folder in it that holds nothing does not count. `attempt_of` names what
    begins the experiment: asked again for the same (a retry), the folder that it `claim`ed goes on.
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
    """Note in the experiment's new folder what has begun it, for `fresh_name`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CLAIM, f"{name} {attempt_of}".encode())


def model_name(model_path: str) -> str:
    """How a run's files name the model that it starts from: a folder by its whole path, a hub model by its name."""
    return str(Path(model_path).resolve()) if Path(model_path).exists() else model_path


def other_beginning(job_dir: JobLayout | Path | str, model_path: str) -> str | None:
    """The model that the run's checkpoints began from, where that is not `model_path`."""
    began = read_meta(as_layout(job_dir).trainer_meta).get("model")
    return began if began not in (None, model_name(model_path)) else None


def read_meta(path: Path) -> dict[str, Any]:
    """`explorer_meta.json` or `trainer_meta.json`; empty where it is missing or unreadable (it can be rebuilt)."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        log.warning("%s is not readable and is ignored: %s", path, error)
        return {}
    return value if isinstance(value, dict) else {}


def update_meta(path: Path, **values: Any) -> dict[str, Any]:
    """Lay `values` over what the file says, in one step; return the whole."""
    merged = {**read_meta(path), **values}
    write_json(path, merged, durable=False)
    return merged
