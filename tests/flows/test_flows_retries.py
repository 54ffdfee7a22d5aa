"""How often Prefect runs a flow again; against a real API."""

from __future__ import annotations

from uuid import UUID

import pytest

from tasks import retries
from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.hosting.faults import ANOTHER_FOLLOWS

pytestmark = pytest.mark.slow


def attempts(
    faults: list[Exception | None], run_id: UUID | None = None, follows: list[bool] | None = None
) -> tuple[int, UUID]:
    """Run a flow, whose attempts raise these faults in turn, as in a new process; the attempts, and the run.

    With `run_id` that run is started anew, as the supervisor does. Each attempt tells `follows` if another one would.
    """
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow
    from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings
    from prefect.states import Scheduled

    left = iter(faults)
    made = 0

    @flow(name="faulty", retries=2, retry_delay_seconds=0)
    def faulty() -> None:
        nonlocal made
        made += 1
        with retries.retry_only_transient_faults():
            (follows if follows is not None else []).append(ANOTHER_FOLLOWS.get()())
            fault = next(left)
            if fault is not None:
                raise fault

    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}), get_client(sync_client=True) as client:
        run = client.create_flow_run(faulty) if run_id is None else client.read_flow_run(run_id)
        client.set_flow_run_state(run.id, Scheduled(), force=True)
        retries._RENEWED.clear()
        run_flow(faulty, flow_run=client.read_flow_run(run.id), return_type="state")
    return made, run.id


def test_each_start_of_a_run_has_all_retries(prefect_api: str) -> None:
    """And each attempt knows if another one follows."""
    fault, follows = TransientFault("an engine was lost"), list[bool]()
    made, run_id = attempts([fault] * 9, follows=follows)
    assert made == 3, "the first attempt and two retries"
    assert attempts([fault] * 9, run_id, follows)[0] == 3, "started anew"
    assert follows == [True, True, False] * 2 and not ANOTHER_FOLLOWS.get()()
    assert attempts([fault, None], run_id)[0] == 2
    assert attempts([fault, TrinityError("a broken row"), None], run_id)[0] == 2, "permanent"
    assert attempts([fault, fault, None], run_id)[0] == 3, "and anew after that"


def test_a_long_attempt_renews_the_retries(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "LONG_SECONDS", 0.0)
    assert attempts([TransientFault("an engine was lost")] * 3 + [None])[0] == 4


def test_what_needs_ray_is_tried_again(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By flows of several runs, which have no retries; and no permanent error is."""
    from prefect import flow

    monkeypatch.setitem(retries.RETRIED, "retry_delay_seconds", 0)
    made = 0

    @retries.patient_task("cluster")
    def start(*faults: Exception) -> int:
        nonlocal made
        made += 1
        if made <= len(faults):
            raise faults[made - 1]
        return made

    away = TransientFault("Ray did not start")
    assert flow(name="patient")(lambda: start(away, away))() == 3
    made = 0
    with pytest.raises(TrinityError):
        flow(name="impatient")(lambda: start(away, TrinityError("too few GPUs"), away))()
    assert made == 2
