"""The task `cluster`, the lifetime of a session, and waiting for tasks that run beside each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger

from tasks.stages import Plan
from trinity_core.layout import JobLayout
from trinity_core.runtime.cluster import close_cluster, open_cluster
from trinity_core.runtime.faults import POLL_SECONDS, first_error_stays, most_telling
from trinity_core.runtime.session import Session, Stage
from trinity_core.tracking.mlflow_writer import close_parent, keep_parent_open


@task(name="cluster", cache_policy=NO_CACHE, persist_result=False)
def cluster(stage: Stage) -> Session:
    """Start or join Ray, and begin to load the engines; the trainer starts with the task that uses it."""
    placement = stage.placement
    session = Session(stage, open_cluster(stage.config, placement.gpu_per_node))
    get_run_logger().info(
        "Ray is up: %s engine(s), %s trainer worker(s), %s GPU(s) per node",
        placement.engines, placement.trainers, placement.gpu_per_node,
    )  # fmt: skip
    return session


@contextmanager
def ending(session: Session) -> Iterator[Session]:
    """End the session with the block, however the block ends: finished, failed, cancelled or interrupted."""
    succeeded = False
    try:
        yield session
        succeeded = True
    finally:
        session.stop()
        with first_error_stays(succeeded):
            try:
                if session.config.monitor.enable_ray_timeline:
                    session.cluster.write_timeline(JobLayout(session.config.job_dir).monitor / "timeline.json")
            finally:
                session.close(succeeded)


@contextmanager
def ending_pipeline(plan: Plan) -> Iterator[None]:
    """Ray stays up between the stages of a pipeline; with the block it ends, and so does the parent run in MLflow."""
    opened = open_cluster(plan.config, plan.gpu_per_node)
    keep_parent_open(plan.config.job_dir)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        with first_error_stays(succeeded):
            try:
                close_cluster(opened)
            finally:
                close_parent(plan.config.job_dir, succeeded)


def together(session: Session, *parts: Task[[Session], Any]) -> dict[str, Any]:
    """Run tasks beside each other, those that the configuration's mode needs: task name -> result.

    When one fails, the others are asked to save and end, and the failure is raised: of several the most telling one. A
    cancellation (an exception in this, the main, thread) does the same, and so does tracking that can never take the
    numbers.
    """
    wanted = [part for part in parts if part.name in session.parts]
    futures = {part.name: cast(PrefectConcurrentFuture[Any], part.submit(session)) for part in wanted}
    try:
        while not all(future.wrapped_future.done() for future in futures.values()):
            if any(_has_failed(future) for future in futures.values()):
                break
            session.check()
            time.sleep(POLL_SECONDS)
    finally:
        if not all(future.wrapped_future.done() for future in futures.values()):
            session.stop()
            for future in futures.values():
                future.wait()
    results = {name: future.result(raise_on_failure=False) for name, future in futures.items()}
    failures = [result for result in results.values() if isinstance(result, BaseException)]
    if failures:
        raise most_telling(failures)
    return results


def _has_failed(future: PrefectConcurrentFuture[Any]) -> bool:
    """Without a call of Prefect's API, which `future.state` makes until the state is known."""
    if not future.wrapped_future.done():
        return False
    future.wait()
    return not future.state.is_completed()
