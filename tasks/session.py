"""The task `cluster`, and running tasks beside each other."""

from __future__ import annotations

from typing import Any, cast

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger

from trinity_core.runtime.session import Session, open_session
from trinity_core.runtime.stage import Stage
from trinity_core.runtime.together import raise_most_telling, wait_for_all


@task(name="cluster", cache_policy=NO_CACHE, persist_result=False)
def cluster(stage: Stage) -> Session:
    """Start or join Ray, and begin to load the engines; the trainer starts with the task that uses it."""
    session = open_session(stage)
    get_run_logger().info(
        "Ray is up: %s engine(s), %s trainer worker(s), %s GPU(s) per node",
        stage.placement.engines, stage.placement.trainers, stage.placement.gpu_per_node,
    )  # fmt: skip
    return session


def together(session: Session, *tasks: Task[[Session], Any]) -> dict[str, Any]:
    """Run tasks beside each other, those that the configuration's mode needs: task name -> result.

    As `runtime.together.run_together` for functions.
    """
    wanted = [each for each in tasks if each.name in session.components]
    futures = {each.name: cast(PrefectConcurrentFuture[Any], each.submit(session)) for each in wanted}
    # What a task's thread returns is a state; asked of the Prefect future it would cost a call of Prefect's API.
    wait_for_all(
        session,
        [future.wrapped_future for future in futures.values()],
        has_failed=lambda future: not future.result().is_completed(),
    )
    results = {name: future.result(raise_on_failure=False) for name, future in futures.items()}
    raise_most_telling([result for result in results.values() if isinstance(result, BaseException)])
    return results
