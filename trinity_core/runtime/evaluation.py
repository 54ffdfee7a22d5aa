"""Finds the weights of a run that have no score yet, and scores them.

A score belongs to a step of a run and to the settings and data behind it: eval sets, sampling, workflow, reward and,
before training, the model. It is a line of source `eval` in the run's metrics file, and is repeated only when these
change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from trinity_core.checkpoints.commit import damage
from trinity_core.checkpoints.resume import latest_whole, whole_steps
from trinity_core.config import Config
from trinity_core.errors import DataError, TrinityError
from trinity_core.layout import MANIFEST
from trinity_core.runtime.run_attempt import RunAttempt
from trinity_core.store.run_store import open_run_store
from trinity_core.tracking.scores import evaluation_of, scores_text, valid_scores

log = logging.getLogger(__name__)


def unscored_steps(config: Config, which: str) -> list[int]:
    """Return the steps selected by `which` whose weights have no score yet; 0 is the model that the engines start with,
    or an external one.

    `which` is `base`, `latest`, `missing`, `all` (including scored ones) or a step. An empty `which` follows mode
    `bench`: the latest checkpoint (or step 0 if there is none), or every one with `bench_on_latest_checkpoint: false`.
    Damaged checkpoints are skipped with a warning, as on resume. Raises TrinityError if the given step has no intact
    checkpoint. An external model has no steps: every value selects it.
    """
    if not config.buffer.explorer_input.eval_tasksets:
        raise TrinityError("There is nothing to evaluate on: buffer.explorer_input.eval_tasksets is empty.")
    if not which:
        every = not config.explorer.bench_on_latest_checkpoint and bool(whole_steps(config.job_dir))
        which = "missing" if every else "latest"
    external = config.external_model is not None and not which.isdigit()
    steps = [0] if external else steps_meant(which, config.job_dir)
    scored = {} if which == "all" else valid_scores(config)
    unscored = [step for step in steps if step not in scored]
    if which in ("missing", "all"):
        unscored = [step for step in unscored if not step or not _is_damaged(config.layout.step(step))]
    return unscored


def unscored_result(attempt: RunAttempt) -> list[int]:
    """Return the run's last checkpoint if it has no score yet and the run has engines and eval sets.

    In mode `bench`, return what `unscored_steps` returns. In `explore` and `serve`, return nothing while the trainer
    may still make checkpoints, and remove this one.
    """
    config = attempt.config
    if config.mode == "bench":
        return unscored_steps(config, "")
    if config.explores_alone and not trainer_has_finished(config):
        return []
    if not attempt.placement.engines or not config.buffer.explorer_input.eval_tasksets:
        return []
    step = latest_whole(config.job_dir)
    return [] if step is None or step in valid_scores(config) else [step]


def score_steps(attempt: RunAttempt, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Score the weights of each step on every eval set; return step → metric → value.

    Checkpoints that a running trainer has removed meanwhile are skipped with a warning. Raises TrinityError if none is
    left.
    """
    config, scores = attempt.config, {}
    for step in steps:
        if step and not _is_there(config, step):
            log.warning("the checkpoint of step %d has been removed and is not scored", step)
            continue
        try:
            folder = attempt.huggingface_folder(step, config.engine_adapter is None) if step else None
            scores[step] = attempt.score(step, folder)
        except (DataError, OSError):
            if not step or _is_there(config, step):
                raise
            log.warning("the checkpoint of step %d was removed while it was scored", step)
            continue
        log.info("step %s: %s", step, scores_text(evaluation_of(config, step)))
    if steps and not scores:
        raise TrinityError(
            f"None of the checkpoints to score is left in {config.job_dir}: training has continued and removed them "
            "(trainer.max_checkpoints_to_keep). Score a later one.",
            key="trainer.max_checkpoints_to_keep",
        )
    return scores


def _is_there(config: Config, step: int) -> bool:
    return (config.layout.step(step) / MANIFEST).exists()


def trainer_has_finished(config: Config) -> bool:
    with open_run_store(config) as store:
        return store.trainer().finished


def steps_meant(which: str, job_dir: Path) -> list[int]:
    """Return the steps of a run that a word selects; 0 is the model before training."""
    if which == "base":
        return [0]
    if which == "latest":
        return [latest_whole(job_dir) or 0]
    whole = whole_steps(job_dir)
    if which in ("missing", "all"):
        return whole
    if int(which) not in whole:
        there = ", ".join(map(str, whole)) or "none"
        raise TrinityError(f"There is no whole checkpoint of step {which}; whole ones: {there}.")
    return [int(which)]


def _is_damaged(folder: Path) -> bool:
    wrong = damage(folder)
    if wrong:
        log.warning("the checkpoint %s is skipped: %s", folder, wrong)
    return wrong is not None
