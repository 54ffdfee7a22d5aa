"""The checkpoints of a run, and the chain of models that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_core.checkpoints.resume import read_meta, whole_steps
from trinity_core.layout import JobLayout, step_of
from trinity_core.tracking.scores import latest_scores


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
    """`project/name` of the run that made it; empty for the first one."""
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
    chain: list[Ancestor] = []
    seen: set[Path] = set()
    while isinstance(model, str):
        made_in = next((folder for folder in Path(model).parents if step_of(folder) is not None), None)
        if made_in is None or made_in.parent in seen:
            chain.append(Ancestor(model))
            break
        run = made_in.parent
        seen.add(run)
        step = step_of(made_in) or 0
        chain.append(Ancestor(model, f"{run.parent.name}/{run.name}", step, latest_scores(run).get(step)))
        model = read_meta(JobLayout(run).trainer_meta).get("model")
    return chain[::-1]
