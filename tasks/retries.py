"""Retry rules for Prefect: only transient failures are retried."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, FlowRunPolicy, State, TaskRun
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.hosting.faults import ANOTHER_FOLLOWS, is_cancelled, is_transient

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

RETRIED: dict[str, Any] = {"retries": 2, "retry_delay_seconds": 5}
"""Options of a flow or task: further attempts after a transient fault, each from the latest checkpoint."""
LONG_SECONDS = 3600.0
"""An attempt that lasts this long counts as progress and restores all retries."""
_RENEWED: set[UUID] = set()


class OneLine(logging.Filter):
    """A log filter that shows errors meant for users without their traceback, and only once."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record; strip the traceback from such errors, and the error from the state message that
        follows."""
        if str(record.msg).startswith("Finished in state Failed("):
            record.msg = "Finished in state Failed"
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, TrinityError | TransientFault):
            record.exc_info = record.exc_text = None
        return True


_ONE_LINE = OneLine()


PIPELINE: ContextVar[str] = ContextVar("pipeline", default="")
"""Within a stage that runs as a subflow: id of the pipeline's flow run."""


class PipelineLog(APILogHandler):
    """Sends what a stage logs to its pipeline's log as well: `prefect deployment run --watch` follows only that one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep what stages say, without the ends of their tasks."""
        is_of_stage = str(getattr(record, "flow_run_id", "")) != PIPELINE.get() != ""
        return is_of_stage and not (record.name == "prefect.task_runs" and "Completed()" in str(record.msg))

    def prepare(self, record: logging.LogRecord) -> dict[str, Any]:
        return super().prepare(record) | {"flow_run_id": PIPELINE.get(), "task_run_id": None}

    def format(self, record: logging.LogRecord) -> str:
        """Return the message after the name of its task or stage."""
        name = getattr(record, "task_run_name", "") or getattr(record, "flow_run_name", "")
        return f"{name}: {super().format(record)}" if name else super().format(record)


def show_our_log() -> None:
    """Pass our log from INFO on to Prefect, that of stages also to their pipelines, whatever its extra loggers are."""
    for name in ("trinity_core", "tasks", "prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        kinds = {type(handler) for handler in logger.handlers}
        if not name.startswith("prefect"):
            logger.setLevel(logging.INFO)
        for kind in {APILogHandler, PipelineLog} - kinds:
            logger.addHandler(kind())


@contextmanager
def retry_only_transient_faults() -> Iterator[None]:
    """Within a flow, let any failure other than a transient one cancel the remaining retries and fail the run at once.

    The same applies to any failure of a run that was asked to end together with others. Each start of the run's
    process, and each attempt that lasts an hour, restores all retries: Prefect counts attempts over a run's whole life,
    so a run that is restarted now and then would soon have none left.
    """
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_ONE_LINE)
    show_our_log()
    began = time.monotonic()
    left = _renew_retries_once() or _retries_are_left()

    def is_long() -> bool:
        return time.monotonic() - began >= LONG_SECONDS

    has_retries = _present() is not None
    token = ANOTHER_FOLLOWS.set(lambda: not is_cancelled() and (left or (has_retries and is_long())))
    try:
        yield
    except Exception as error:
        if not is_transient(error) or is_cancelled():
            _change_policy(lambda run, _: FlowRunPolicy(retries=0, retry_delay=0))
        elif is_long():
            _change_policy(_renewed)
        raise
    finally:
        ANOTHER_FOLLOWS.reset(token)


def named_task(name: str, **options: Any) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Return a task whose run has the same name: a flow runs each once, and log lines begin with it."""
    return task(name=name, task_run_name=lambda: name, cache_policy=NO_CACHE, persist_result=False, **options)


def patient_task(name: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """Return a task with retries after transient faults, for a flow of several runs, which has no retries of its
    own."""
    return named_task(name, retry_condition_fn=_has_failed_for_now, **RETRIED)


def _has_failed_for_now(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    return isinstance(state.data, Exception) and is_transient(state.data)


def api_faults() -> tuple[type[Exception], ...]:
    """Return the exceptions of a call to Prefect's API if the server is down or refuses it."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    return HTTPError, PrefectException


def _present() -> tuple[FlowRun, int] | None:
    """Return the current run, as of the attempt's start, and its flow's retries; None if it has none."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow is None or not context.flow.retries:
        return None
    return context.flow_run, context.flow.retries


def _renew_retries_once() -> bool:
    """Restore the retries at a run's first attempt in this process. Return True if this is it, and the run has
    retries."""
    present = _present()
    if present is None or present[0].id in _RENEWED:
        return False
    _RENEWED.add(present[0].id)
    _change_policy(_renewed)
    return True


def _retries_are_left() -> bool:
    present = _present()
    return present is not None and present[0].run_count <= (present[0].empirical_policy.retries or 0)


def _renewed(run: FlowRun, retries: int) -> FlowRunPolicy:
    """Return the policy with all retries restored. Prefect retries while the number of attempts does not exceed the
    policy's retries."""
    allowed = max(run.run_count - 1, 0) + retries
    return run.empirical_policy.model_copy(update={"retries": allowed})


def _change_policy(change: Callable[[FlowRun, int], FlowRunPolicy]) -> None:
    """Set the run's policy to what `change` computes from the run and the flow's declared retries."""
    from prefect.client.orchestration import get_client

    present = _present()
    if present is None:
        return
    started, retries = present
    try:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(started.id)
            policy = change(run, retries)
            if policy != run.empirical_policy:
                client.update_flow_run(run.id, empirical_policy=policy)
    except api_faults() as error:
        log.warning("the retries of this run could not be set in Prefect: %s", error)
