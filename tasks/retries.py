"""Which failures Prefect retries: only those that another attempt can get past."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.runtime.ending import asked_to_end
from trinity_core.runtime.faults import is_transient

log = logging.getLogger(__name__)


class OneLine(logging.Filter):
    """A log filter: errors with a message for the user appear without their traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record; strip the traceback from those."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, TrinityError | TransientFault):
            record.exc_info = record.exc_text = None
        return True


_ONE_LINE = OneLine()


@contextmanager
def retry_only_transient_faults() -> Iterator[None]:
    """Within a flow: any other failure takes away the retries that are left, and fails the run at once.

    So does any failure of a run that has been asked to end, together with those beside it.
    """
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_ONE_LINE)
    try:
        yield
    except Exception as error:
        if not is_transient(error) or asked_to_end():
            _forbid_retries()
        raise


def api_faults() -> tuple[type[Exception], ...]:
    """What a call of Prefect's API raises if the server is away or refuses it."""
    from httpx import HTTPError
    from prefect.exceptions import PrefectException

    return HTTPError, PrefectException


def _forbid_retries() -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import FlowRunPolicy
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow is None or not context.flow.retries:
        return
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(context.flow_run.id, empirical_policy=FlowRunPolicy(retries=0, retry_delay=0))
    except api_faults() as error:
        log.warning("Prefect cannot be told that another attempt would be of no use: %s", error)
