"""Evaluation beside training: an engine of its own scores each checkpoint while the run trains."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

import psutil

from trinity_core.base.errors import TransientFault
from trinity_core.base.layout import MANIFEST
from trinity_core.config import Config
from trinity_core.exchange.checkpoints.resume import whole_steps
from trinity_core.exchange.tracking.scores import steps_to_evaluate, valid_scores
from trinity_core.hosting.cluster import Cluster
from trinity_core.hosting.faults import Stopped
from trinity_core.run.attempt import RunAttempt, open_attempt
from trinity_core.run.stage import Stage, StageRequest, choose_stage
from trinity_core.run.summary import score_step

log = logging.getLogger(__name__)
BESIDE = "evaluate beside training"
"""Name of the component of a run."""
LOOK_SECONDS = 1.0
"""Interval at which new checkpoints are looked for."""
NICENESS = 10
"""Of the evaluation's processes: the run's come first where both want a core."""
REPEATS = 3
"""Repetitions of an evaluation whose processes were lost, before the attempt at the run fails."""


class EvaluationAttempt(RunAttempt):
    """The processes of the evaluation, which ends with its run. The run itself tracks the scores."""

    def __init__(self, stage: Stage, cluster: Cluster, run: RunAttempt) -> None:
        self._run = run
        super().__init__(stage, cluster)

    def is_stopping(self) -> bool:
        return super().is_stopping() or self._run.is_stopping()

    def _end_actors(self, succeeded: bool) -> None:
        """End all of them: a later stage of a pipeline must not get an engine of low priority."""
        super()._end_actors(succeeded=False)

    def _track(self) -> None:
        """Open no tracking system: W&B admits one writer to a run, and a Prometheus port has one page."""


def evaluate_beside(run: RunAttempt) -> None:
    """Score the checkpoints of a run as they appear, and at its end the last one.

    Raises Stopped if the run is asked to stop, TransientFault if the evaluation's processes are lost too often.
    """
    stage = stage_beside(run.config)
    for repeat in range(REPEATS + 1):
        try:
            with open_attempt(stage, partial(EvaluationAttempt, run=run)) as evaluation:
                _score_until_trained(run, evaluation)
            return
        except Stopped:
            raise
        except TransientFault as fault:
            if repeat == REPEATS:
                raise
            log.warning("the evaluation beside training is repeated: %s", fault)


def stage_beside(config: Config) -> Stage:
    """Return the stage that scores a run's own checkpoints, not its `external_model`, with one engine."""
    config = config.with_values({"explorer.rollout_model.engine_num": 1, "explorer.external_model": None})
    return choose_stage(StageRequest(config, "evaluate", run=config.name), is_ready=True)


def _score_until_trained(run: RunAttempt, evaluation: RunAttempt) -> None:
    for actor in (*evaluation.engines(), evaluation.explorer()):
        actor.__ray_call__.remote(_lower_priority)
    config = evaluation.config
    tried: set[tuple[int, int]] = set()
    """Checkpoints, by step and time of their manifest: a run that goes back writes another one of the same step."""
    while True:
        is_over = run.trainers.has_ended  # before looking: the last checkpoint is there by then
        steps = _steps(config, is_over)
        new = [key for step in steps if (key := (step, _written_at(evaluation, step))) not in tried]
        if new:
            tried.add(new[0])
            step, scores = new[0][0], valid_scores(config)
            # Step 0 comes first, so a run without any score has yet to score it, also if it was killed meanwhile.
            if step not in scores and (step or not scores):
                score_step(evaluation, step)
        elif is_over:
            return
        else:
            evaluation.check()
            if evaluation.is_stopping():
                raise Stopped("The evaluation beside training has ended with its run.")
            time.sleep(LOOK_SECONDS)


def _steps(config: Config, is_over: bool) -> list[int]:
    """Return the steps to score, also those with a score; step 0 is the model that the run began with."""
    whole = whole_steps(config.job_dir)
    begins = [0] if config.explorer.eval_on_startup else []
    return list(dict.fromkeys([*begins, *steps_to_evaluate(config, whole), *(whole[-1:] if is_over else ())]))


def _written_at(evaluation: RunAttempt, step: int) -> int:
    """Return when the checkpoint was written, in ns since 1970; 0 if it is gone, or for step 0."""
    try:
        return (evaluation.config.layout.step(step) / MANIFEST).stat().st_mtime_ns if step else 0
    except FileNotFoundError:
        return 0


def _lower_priority(_actor: Any) -> None:
    """Lower the priority of every thread of an actor's process; what they start inherits it."""
    for thread in psutil.Process().threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, NICENESS)
