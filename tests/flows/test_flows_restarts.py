"""Which crashed runs are started again, and how often; against a real API."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flows.local.restarts import MARK, Restarter, Verdict, verdict
from tasks.prefect_api import api_client

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def states(*names: str, minutes: float = 1) -> list[Any]:
    """States a few minutes apart, of which the last one is now. `MARK` is a restart of ours."""
    from prefect import states

    made = []
    for i, name in enumerate(names):
        kind, message = ("Scheduled", MARK) if name == "MARK" else (name, None)
        at = NOW - timedelta(minutes=minutes * (len(names) - 1 - i))
        made.append(getattr(states, kind)(message=message).model_copy(update={"timestamp": at}))
    return made


KILLED = ("Scheduled", "Pending", "Running", "Crashed")
AGAIN = ("MARK", "Pending", "Running", "Crashed")


@pytest.mark.parametrize(
    ("names", "minutes", "expected"),
    [
        (KILLED, 1, Verdict.RESTART),
        (("Scheduled", "Pending", "Crashed"), 1, Verdict.LEAVE),
        ((*KILLED, "Scheduled", "Pending", "Crashed"), 1, Verdict.LEAVE),
        (("Scheduled", "Pending", "Running", "Cancelling", "Crashed"), 1, Verdict.LEAVE),
        (("Scheduled", "Pending", "Running", "AwaitingRetry", "Crashed"), 1, Verdict.RESTART),
        ((*KILLED, *AGAIN), 1, Verdict.RESTART),
        ((*KILLED, *AGAIN, *AGAIN), 1, Verdict.ENOUGH),
        ((*KILLED, *AGAIN, *AGAIN), 10, Verdict.RESTART),
    ],
)
def test_killed_runs_are_restarted_twice_an_hour(names: tuple[str, ...], minutes: float, expected: Verdict) -> None:
    assert verdict(states(*names, minutes=minutes)[::-1], NOW, 2) is expected


@pytest.mark.slow
def test_a_killed_run_is_scheduled_again_and_no_other(prefect_api: str) -> None:
    from prefect import flow, task
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.states import Cancelling, Crashed, Failed, Pending, Running

    def work() -> None: ...

    with api_client(prefect_api) as client:
        client.create_work_pool(WorkPoolCreate(name="restarts", type="process"))
        where = {"work_pool_name": "restarts", "entrypoint": "work.py:work"}
        deployment = client.create_deployment(client.create_flow(flow(work)), name="one", **where)

        def run(*ends: Callable[[], Any]) -> Any:
            made = client.create_flow_run_from_deployment(deployment)
            for state in (Pending, Running, *ends):
                client.set_flow_run_state(made.id, state(), force=True)
            return made.id

        def nothing() -> None: ...

        long_ago = run(Crashed)
        since = datetime.now(UTC)
        killed, failed, cancelled = run(Crashed), run(Failed), run(Cancelling, Crashed)
        placeholder = client.create_task_run(task(nothing), killed, dynamic_key="0")
        part = client.create_flow_run(flow(nothing), parent_task_run_id=placeholder.id, state=Running()).id
        restarter = Restarter(client, "restarts", since, 1)
        restarter.look()

        def state(run_id: Any) -> Any:
            found = client.read_flow_run(run_id).state
            return found.type.value, found.message == MARK

        assert state(killed) == ("SCHEDULED", True) and state(part)[0] == "CRASHED"
        assert {state(other)[0] for other in (long_ago, cancelled)} == {"CRASHED"} and state(failed)[0] == "FAILED"
        for each in (Pending, Running, Crashed):
            client.set_flow_run_state(killed, each(), force=True)
        restarter.look()
        restarter.look()
        assert state(killed) == ("CRASHED", False), "once an hour is enough"
