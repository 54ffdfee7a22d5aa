"""The tasks of evaluation: what has no score yet, scoring it, showing the scores.

A score belongs to a step of a run: it is a line of source `eval` in the run's metrics file, and is not made twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.reports import show_curve, show_rollouts, show_summary
from trinity_core.checkpoints.huggingface import huggingface_folder
from trinity_core.checkpoints.resume import whole_steps
from trinity_core.errors import TrinityError
from trinity_core.runtime.faults import result_of
from trinity_core.runtime.session import Session, Stage
from trinity_core.tracking import read_metrics
from trinity_core.tracking.forwarder import eval_scores


@dataclass(frozen=True, slots=True)
class Target:
    """Weights to score."""

    step: int
    """0 for the model before training."""
    folder: Path | None
    """In Hugging Face format; None for the model that the engines start with."""


@task(name="find", cache_policy=NO_CACHE, persist_result=False)
def unscored(stage: Stage, which: str) -> list[Target]:
    """The targets that `which` means and that have no score yet.

    `base`, `latest`, `missing`, `all` or a step. Raises TrinityError where a step has no whole checkpoint.
    """
    config = stage.config
    if not config.buffer.explorer_input.eval_tasksets:
        raise TrinityError("There is nothing to evaluate on: buffer.explorer_input.eval_tasksets is empty.")
    steps = steps_meant(which, whole_steps(config.job_dir))
    scored = {} if which == "all" else eval_scores(read_metrics(config.job_dir))
    missing = [step for step in steps if step not in scored]
    get_run_logger().info("To score: %s", ", ".join(f"step {step}" for step in missing) or "nothing")
    return [Target(step, huggingface_folder(config, step) if step else None) for step in missing]


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def score(session: Session, targets: list[Target]) -> dict[int, dict[str, float]]:
    """Score each target on every eval set: step -> metric name -> value."""
    explorer = session.explorer()
    scores = {}
    for target in targets:
        folder = str(target.folder) if target.folder else None
        scoring = explorer.evaluate.remote(target.step, folder)
        scores[target.step] = result_of(scoring, lambda: session.stopping, session.check)
        get_run_logger().info("step %s: %s", target.step, scores[target.step])
    return scores


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate_result(session: Session) -> dict[str, float]:
    """Score the run's last checkpoint where it has no score yet: metric name -> value."""
    config = session.config
    steps = whole_steps(config.job_dir)
    if not steps or not session.placement.engines or not config.buffer.explorer_input.eval_tasksets:
        return {}
    if steps[-1] in eval_scores(read_metrics(config.job_dir)):
        return {}
    folder = str(session.huggingface_folder(steps[-1]))
    scoring = session.explorer().evaluate.remote(steps[-1], folder)
    scores = result_of(scoring, lambda: session.stopping, session.check)
    get_run_logger().info("step %s: %s", steps[-1], scores)
    return scores


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish_scores(stage: Stage, seconds: float = 0.0) -> dict[str, Any]:
    """All scores of the run, by step; `score` is the latest."""
    config = stage.config
    scores = eval_scores(read_metrics(config.job_dir))
    latest = max(scores, default=0)
    summary = {
        "project": config.project,
        "name": config.name,
        "step": latest,
        "scores": {f"step {step}": value for step, value in scores.items()},
        "score": scores.get(latest),
        "checkpoint_dir": str(config.job_dir),
        "hf_dir": None,
        "tracking": str(config.job_dir / "monitor" / "metrics.jsonl"),
        "seconds": round(seconds, 2),
    }
    show_curve(config)
    show_rollouts(config)
    show_summary(config, summary)
    return summary


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
