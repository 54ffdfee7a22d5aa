"""Where a checkpoint comes from: its run's configuration and data, and the chain of models that it began with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trinity_core.checkpoints.resume import read_meta, whole_steps
from trinity_core.layout import JobLayout, step_of
from trinity_core.tracking.scores import latest_scores

DATA = re.compile(r"buffer\.(explorer_input\.tasksets?|trainer_input\.experience_buffer)\b.*\.path")
"""Settings that name what a run learns from; lists of them are numbered."""
ABOUT = ("algorithm.algorithm_type", "algorithm.optimizer.lr", "mode", "seed")
"""Settings that are told beside it."""


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint of a run."""

    step: int
    folder: Path
    score: float | None
    """The mean accuracy (or reward) of its latest evaluation."""
    is_converted: bool
    """There is a Hugging Face folder."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A model in the chain: a run's checkpoint, or the one that everything began with."""

    model: str
    """Its folder or hub name."""
    run: str = ""
    """Name of the run that made it; empty for the first one."""
    step: int = 0
    score: float | None = None


def checkpoints_of(job_dir: Path) -> list[CheckpointRow]:
    """The whole checkpoints of a run, by step."""
    layout, scores = JobLayout(job_dir), latest_scores(job_dir)
    return [
        CheckpointRow(step, layout.step(step), scores.get(step), (layout.huggingface(step) / "config.json").is_file())
        for step in whole_steps(layout)
    ]


def ancestors(job_dir: Path) -> list[Ancestor]:
    """The models that a run's checkpoints came from, the first one first; empty if that was not noted."""
    model = read_meta(JobLayout(job_dir).trainer_meta).get("model")
    found: list[Ancestor] = []
    seen: set[Path] = set()
    while isinstance(model, str):
        made_in = _checkpoint_above(Path(model))
        if made_in is None or made_in.parent in seen:
            found.append(Ancestor(model))
            break
        seen.add(made_in.parent)
        step = step_of(made_in) or 0
        score = latest_scores(made_in.parent).get(step)
        found.append(Ancestor(model, made_in.parent.name, step, score))
        model = read_meta(JobLayout(made_in.parent).trainer_meta).get("model")
    return found[::-1]


def made_with(params: Mapping[str, str]) -> dict[str, str]:
    """Data and main settings of a run, from its configuration under dotted names; what is empty is left out."""
    names = [*ABOUT, *(name for name in params if DATA.fullmatch(name))]
    return {name: params[name] for name in names if params.get(name, "None") not in ("", "None")}


def _checkpoint_above(model: Path) -> Path | None:
    """The checkpoint's folder that a converted model lies in."""
    return next((folder for folder in model.parents if step_of(folder) is not None), None)
