"""Which weights of a run have no score yet.

A score belongs to a step of a run and to what it was made with: eval sets, sampling, workflow, reward and, before
training, the model. It is a line of source `eval` in the run's metrics file, and is made again only when these change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trinity_core.checkpoints.huggingface import huggingface_folder
from trinity_core.checkpoints.resume import whole_steps
from trinity_core.config import Config, store_url
from trinity_core.errors import TrinityError
from trinity_core.rollout.score_fingerprint import valid_scores
from trinity_core.runtime.session import Session
from trinity_core.store.store import ExperienceStore


@dataclass(frozen=True, slots=True)
class Target:
    """Weights to score."""

    step: int
    """0 for the model before training."""
    folder: Path | None
    """In Hugging Face format; None for the model that the engines start with, or an external one."""


def unscored_targets(config: Config, which: str) -> list[Target]:
    """The targets that `which` means and that have no score yet.

    `base`, `latest`, `missing`, `all` (scored ones too) or a step. Raises TrinityError if a step has no whole
    checkpoint. An external model has no steps: each word means it.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        raise TrinityError("There is nothing to evaluate on: buffer.explorer_input.eval_tasksets is empty.")
    external = config.external_model is not None and not which.isdigit()
    steps = [0] if external else steps_meant(which, whole_steps(config.job_dir))
    scored = {} if which == "all" else valid_scores(config)
    missing = [step for step in steps if step not in scored]
    return [Target(step, huggingface_folder(config, step) if step else None) for step in missing]


def unscored_result(session: Session) -> list[Target]:
    """The run's last checkpoint, if it has no score yet and the run has engines and eval sets; else nothing.

    In mode `bench` every checkpoint without a score, unless `bench_on_latest_checkpoint`, and the model that the
    engines start with if there is no checkpoint. In `explore` and `serve` nothing while the trainer may make further
    checkpoints, and remove this one.
    """
    config = session.config
    if config.mode == "bench":
        every = not config.explorer.bench_on_latest_checkpoint and bool(whole_steps(config.job_dir))
        return unscored_targets(config, "missing" if every else "latest")
    if config.explores_alone and not trainer_has_finished(config):
        return []
    steps = whole_steps(config.job_dir)
    if not steps or not session.placement.engines or not config.buffer.explorer_input.eval_tasksets:
        return []
    if steps[-1] in valid_scores(config):
        return []
    return [Target(steps[-1], session.huggingface_folder(steps[-1]))]


def trainer_has_finished(config: Config) -> bool:
    """Whether a checkpoint of the run holds its trainer's last step."""
    with ExperienceStore.open(store_url(config), str(config.job_dir)) as store:
        return store.trainer().finished


def steps_meant(which: str, whole: list[int]) -> list[int]:
    """The steps that a word means, given those with a whole checkpoint; 0 is the model before training."""
    if which == "base":
        return [0]
    if which == "latest":
        return whole[-1:] or [0]
    if which in ("missing", "all"):
        return whole
    if int(which) not in whole:
        there = ", ".join(map(str, whole)) or "none"
        raise TrinityError(f"There is no whole checkpoint of step {which}; whole ones: {there}.")
    return [int(which)]
