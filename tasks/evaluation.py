"""The tasks of evaluation: find what has no score yet, score it, show the scores."""

from __future__ import annotations

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.reports import show_curve, show_rollouts, show_summary, shown_if_possible
from trinity_core.runtime import run
from trinity_core.runtime.evaluation import Target, unscored_targets
from trinity_core.runtime.session import Session
from trinity_core.runtime.stage import Stage
from trinity_core.runtime.summary import summary_of_scores


@task(name="find", cache_policy=NO_CACHE, persist_result=False)
def unscored(stage: Stage, which: str) -> list[Target]:
    """The targets that `which` means and that have no score yet."""
    targets = unscored_targets(stage.config, which)
    get_run_logger().info("To score: %s", ", ".join(f"step {target.step}" for target in targets) or "nothing")
    return targets


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def score(session: Session, targets: list[Target]) -> dict[int, dict[str, float]]:
    """Score each target on every eval set: step -> metric name -> value."""
    scores = {}
    for target in targets:
        scores[target.step] = session.score(target.step, target.folder)
        get_run_logger().info("step %s: %s", target.step, scores[target.step])
    return scores


@task(name="evaluate", cache_policy=NO_CACHE, persist_result=False)
def evaluate_result(session: Session) -> dict[int, dict[str, float]]:
    """Score the run's last checkpoint if it has no score yet: step -> metric name -> value."""
    scores = run.evaluate(session)
    for step, metrics in scores.items():
        get_run_logger().info("step %s: %s", step, metrics)
    return scores


@task(name="publish", cache_policy=NO_CACHE, persist_result=False)
def publish_scores(stage: Stage, seconds: float = 0.0) -> dict[str, Any]:
    """Show all scores of the run, by step; `score` is the latest."""
    summary = summary_of_scores(stage.config, seconds)
    with shown_if_possible():
        show_curve(stage.config)
        show_rollouts(stage.config)
        show_summary(stage.config, summary)
    return summary
