"""Runs that were killed run again by themselves: the keeper of `trinity up` looks for crashed runs and retries them.

A flow's own retries need its process; these are for the case that the process is gone (SIGKILL, lack of memory, a
machine that went down). Left alone is what was cancelled, what has failed, and what crashed before it began to run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from flows.local.runs import crashed_runs, mark_subflows_crashed

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)

RESTARTS = 3
"""Of one run within an hour, by default."""
POLL_SECONDS = 5.0
HOUR = timedelta(hours=1)
MARK = "Killed, and started again by `trinity up`"
"""The message of the state by which a run is retried: by it the restarts of the last hour are counted."""


class Verdict(Enum):
    """What is to be done about a crashed run."""

    LEAVE = auto()
    """It was cancelled, or never began to run."""
    RESTART = auto()
    ENOUGH = auto()
    """It has been restarted too often within the last hour."""


def verdict(states: Sequence[State[Any]], now: datetime, restarts: int) -> Verdict:
    """About a crashed run that has been in these states and may be restarted so many times an hour."""
    ordered = sorted(states, key=lambda state: state.timestamp)
    begins = [i for i, state in enumerate(ordered) if state.is_scheduled() and state.name != "AwaitingRetry"]
    kinds = {state.type.value for state in ordered[max(begins, default=0) :]}
    if "RUNNING" not in kinds or kinds & {"CANCELLING", "CANCELLED"}:
        return Verdict.LEAVE
    recent = [state for state in ordered if state.message == MARK and state.timestamp > now - HOUR]
    return Verdict.RESTART if len(recent) < restarts else Verdict.ENOUGH


class Restarter:
    """Restarts the pool's runs that have crashed since a time, each at most `restarts` times an hour."""

    def __init__(self, client: SyncPrefectClient, pool: str, since: datetime, restarts: int) -> None:
        self._client = client
        self._pool = pool
        self._since = since
        self._restarts = restarts
        self._judged: dict[Any, Verdict] = {}
        """What was found about a crash, by the id of its state."""

    def look(self) -> None:
        """Look once, and restart what was killed."""
        for run in crashed_runs(self._client, self._pool, self._since):
            if run.state is not None and self._judged.get(run.state.id) is not Verdict.LEAVE:
                self._judge(run, run.state)

    def _judge(self, run: FlowRun, crash: State[Any]) -> None:
        from prefect.states import Scheduled

        before = self._judged.get(crash.id)
        now = verdict(self._client.read_flow_run_states(run.id), datetime.now(UTC), self._restarts)
        self._judged[crash.id] = now
        if now is Verdict.RESTART:
            mark_subflows_crashed(self._client, [run], "The process of its flow run was killed")
            self._client.set_flow_run_state(run.id, Scheduled(message=MARK), force=True)
            self._say(run, f"The run {run.name} was killed and is started again. {crash.message or ''}")
        elif now is Verdict.ENOUGH and before is not now:
            self._say(
                run,
                f"The run {run.name} was killed again. {self._restarts} restarts within an hour are enough; the next "
                f"one comes when the hour is over. `prefect flow-run retry {run.id}` starts it now.",
            )

    def _say(self, run: FlowRun, text: str) -> None:
        """In this process's log, and in the run's."""
        log.warning(text)
        now = datetime.now(UTC).isoformat()
        line = {"name": "trinity", "level": logging.WARNING, "message": text, "timestamp": now}
        self._client.create_logs([line | {"flow_run_id": str(run.id)}])
