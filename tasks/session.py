"""The tasks `cluster`, and running tasks beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from prefect import Flow, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture
from prefect.logging import get_run_logger

from tasks.retries import patient_task
from trinity_core.config import Config
from trinity_core.runtime.beside import Part
from trinity_core.runtime.cluster import Cluster, open_cluster
from trinity_core.runtime.ending import SharedEnd
from trinity_core.runtime.session import Session, open_session
from trinity_core.runtime.stage import Stage
from trinity_core.runtime.together import Stoppable, raise_most_telling, wait_for_all


@task(name="cluster", cache_policy=NO_CACHE, persist_result=False)
def cluster(stage: Stage) -> Session:
    """Start or join Ray, and begin to load the engines; the trainer starts with the task that uses it."""
    session = open_session(stage)
    get_run_logger().info(
        "Ray is up: %s engine(s), %s trainer worker(s), %s GPU(s) per node",
        stage.placement.engines, stage.placement.trainers, stage.placement.gpu_per_node,
    )  # fmt: skip
    return session


@patient_task("cluster")
def shared_cluster(config: Config, gpus: int) -> Cluster:
    """Start or join Ray, with so many GPUs a node, for several runs of this process; `close_cluster` goes with it."""
    return open_cluster(config, gpus)


def together(session: Session, *tasks: Task[[Session], Any]) -> dict[str, Any]:
    """Run tasks beside each other, those that the configuration's mode needs: task name -> result.

    As `runtime.together.run_together` for functions.
    """
    wanted = [each for each in tasks if each.name in session.components]
    results = _results(session, {each.name: each.submit(session) for each in wanted})
    session.raise_if_ended()
    return results


@task(name="part", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_part(name: str, subflow: Flow[..., dict[str, Any]], file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Run a configuration as a subflow; its summary."""
    return subflow(file, list(overrides))


def run_beside(
    end: SharedEnd, parts: Sequence[Part], subflow: Flow[..., dict[str, Any]], overrides: Sequence[str]
) -> dict[str, Any]:
    """Run the parts beside each other, each as a subflow: name -> summary. When one fails, the others save and end."""
    futures = {part.name: run_part.submit(part.name, subflow, part.file, overrides) for part in parts}
    return _results(end, futures)


def _results(session: Stoppable, submitted: Mapping[str, Any]) -> dict[str, Any]:
    """Wait for tasks that were submitted to threads: name -> result; raises the most telling failure."""
    futures = cast(dict[str, PrefectConcurrentFuture[Any]], submitted)
    # What a task's thread returns is a state; asked of the Prefect future it would cost a call of Prefect's API.
    wait_for_all(
        session,
        [future.wrapped_future for future in futures.values()],
        has_failed=lambda future: not future.result().is_completed(),
    )
    results = {name: future.result(raise_on_failure=False) for name, future in futures.items()}
    raise_most_telling([result for result in results.values() if isinstance(result, BaseException)])
    return results
