"""The driver's steps as Prefect tasks and subflows, with artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from prefect import flow
from prefect.futures import PrefectConcurrentFuture
from prefect.runtime import flow_run
from prefect.states import Cancelled, State

from tasks.reports import (
    LiveReport,
    begin_summary,
    label_run,
    show_curve,
    show_if_possible,
    show_rollouts,
    show_summary,
)
from tasks.retries import RETRIES, RETRY_DELAY, named_task, patient_task, retry_only_transient_faults
from tasks.verdicts import ask
from trinity_core.config import Config
from trinity_core.runtime.faults import Stopped, is_cancelled
from trinity_core.runtime.frontend import Frontend, Stoppable, raise_most_telling, wait_for_all
from trinity_core.runtime.stage import Stage, StageRequest
from trinity_core.runtime.verdicts import asks_person

T = TypeVar("T")


class PrefectFrontend(Frontend):
    """Use it within a flow. Steps are closures: their values stay in this process."""

    report = LiveReport

    def call(self, name: str, step: Callable[[], T], retries: bool = False) -> T:
        """Run the step as a task; with `retries` the task has retries, for a flow of several runs, which has none
        itself."""
        as_task = patient_task(name) if retries else named_task(name)
        return as_task(step)()

    def subflow(self, request: StageRequest, run: Callable[[], T]) -> T:
        """Run a stage as a subflow with retries. It gets its configuration as a value, which Prefect does not store."""
        results, stopped = list[T](), list[Stopped]()

        def stage_flow(name: str, stage: str, model_path: str, config: str, overrides: list[str]) -> State[Any] | None:
            # Not returned: Prefect would record the next stage's arguments as results of this flow run, and its page
            # shows no tasks at all with such inputs (PrefectHQ/prefect 18680).
            with retry_only_transient_faults():
                try:
                    results.append(run())
                except Stopped as error:
                    if not is_cancelled():
                        raise  # another attempt follows
                    stopped.append(error)
                    return Cancelled(message=str(error))
            return None

        # Prefect finds the subflow's run by this name when its parent flow is restarted.
        name = request.run or request.config.name
        stage_flow.__qualname__ = "_".join([request.kind, name, request.stage, request.which]).replace(".", "_")
        title = f"{request.kind} {request.title}"
        as_flow = flow(
            name=request.kind, flow_run_name=lambda: title, retries=RETRIES, retry_delay_seconds=RETRY_DELAY,
            persist_result=False,
        )  # fmt: skip
        above = flow_run.parameters
        file = request.file or str(above.get("config", ""))
        try:
            as_flow(stage_flow)(name, request.stage, request.model_path, file, list(above.get("overrides") or ()))
        except Exception:
            raise_most_telling(stopped)  # Prefect raises CancelledRun instead, or an earlier attempt's fault
            raise
        return results[-1]

    def run_components(self, run: Stoppable, components: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        stopped = dict[str, Stopped]()

        def as_task(name: str, component: Callable[[], T]) -> PrefectConcurrentFuture[Any]:
            def ended() -> T | State[Any]:
                try:
                    return component()
                except Stopped as error:
                    stopped[name] = error
                    return Cancelled(message=str(error))

            return cast(PrefectConcurrentFuture[Any], named_task(name)(ended).submit())

        futures = {name: as_task(name, component) for name, component in components.items()}
        # The wrapped future holds the state; the Prefect future would need an API call for it.
        wait_for_all(
            run,
            [future.wrapped_future for future in futures.values()],
            has_failed=lambda future: not future.result().is_completed(),
        )
        results: dict[str, Any] = {
            name: stopped.get(name) or future.result(raise_on_failure=False) for name, future in futures.items()
        }
        raise_most_telling([result for result in results.values() if isinstance(result, BaseException)])
        return results

    def begun_by(self) -> str:
        return flow_run.root_flow_run_id or ""

    def is_retry(self) -> bool:
        """True after the first attempt at the flow run, or at the stage's subflow run, by Prefect's count."""
        return bool(flow_run.run_count > 1)

    def announce(self, config: Config, stage: str) -> None:
        """Name and tag the flow run, and link to Studio while that is served."""
        algorithm = [] if config.stages else [f"algorithm:{config.algorithm.algorithm_type}"]
        label_run(config.project, config.name, stage, *algorithm)
        show_if_possible(lambda: begin_summary(config))

    def with_human_verdicts(self, stage: Stage) -> Stage:
        if asks_person(stage.config) and not ask(stage):
            return stage
        return super().with_human_verdicts(stage)

    def show(self, config: Config, summary: dict[str, Any], is_pipeline: bool = False) -> None:
        if not is_pipeline:
            show_if_possible(lambda: show_curve(config))
            show_if_possible(lambda: show_rollouts(config))
        rest = {name: value for name, value in summary.items() if name != "results"}
        show_if_possible(lambda: show_summary(config, rest))


PREFECT = PrefectFrontend()
