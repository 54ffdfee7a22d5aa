"""A paused run asks a person on Prefect's own page."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from trinity_core.config import Config
from trinity_core.exchange.tracking.pauses import Decision

pytestmark = [pytest.mark.campaign, pytest.mark.slow]


def paused(config: Config) -> Callable[[], Decision | None]:
    """A flow that asks as one does whose run has paused."""
    from prefect import flow

    from tasks.frontend import PREFECT

    @flow(name="paused", persist_result=False)
    def ask() -> Decision | None:
        return PREFECT.decides(config, "the run waits")

    return ask


def answer(person_says: dict[str, str]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.exceptions import PrefectHTTPStatusError

    seen: dict[str, Any] = {
        "flow_filter": FlowFilter(name={"any_": ["paused"]}),
        "flow_run_filter": FlowRunFilter(state={"type": {"any_": ["PAUSED"]}}),
    }
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for run in client.read_flow_runs(**seen):
                try:
                    client.resume_flow_run(run.id, run_input=person_says)
                    return
                except PrefectHTTPStatusError:  # a run pauses before it saves its form
                    continue
            time.sleep(0.1)
    pytest.fail("the flow does not pause")


def test_a_decision_on_the_page(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is no decision is asked for again."""
    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)
    said = {"decision": "continue", "settings": "algorithm.optimizer.lr=1e-5 a.b=2", "by": "Ada", "reason": "too fast"}

    def person() -> None:
        answer({"decision": "stop", "settings": "a.b=1"})
        answer(said)

    with ThreadPoolExecutor() as threads:
        answered = threads.submit(copy_context().run, person)
        decision = paused(Config())()
        answered.result(60)
    assert decision == Decision("continue", ["algorithm.optimizer.lr=1e-5", "a.b=2"], "Ada", "too fast")


def test_nobody_decides_in_time(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.frontend.POLL_SECONDS", 0.5)
    assert paused(Config().with_values({"monitor.pause.timeout": 1.0}))() is None
