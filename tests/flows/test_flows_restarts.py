"""Which crashed runs are started again, and how often; against a real API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import psutil
import pytest

from flows.local.commands import _mark_left_runs
from flows.local.worker import RESTARTED, Supervisor, mark_ended, pool_is_shared, restarts_left, worker_name
from tasks.prefect_api import api_client
from trinity_core.base.files import write_atomically
from trinity_core.base.gate import key_file, make_state_dir

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def states(*names: str, minutes: float = 1) -> list[Any]:
    """States a few minutes apart, of which the last one is now. `RESTARTED` is a restart of ours."""
    from prefect import states

    made = []
    for i, name in enumerate(names):
        kind, message = ("Scheduled", RESTARTED) if name == "RESTARTED" else (name, None)
        at = NOW - timedelta(minutes=minutes * (len(names) - 1 - i))
        made.append(getattr(states, kind)(message=message).model_copy(update={"timestamp": at}))
    return made


KILLED = ("Scheduled", "Pending", "Running", "Crashed")
AGAIN = ("RESTARTED", "Pending", "Running", "Crashed")


@pytest.mark.parametrize(
    ("names", "minutes", "expected"),
    [
        (KILLED, 1, 2),
        (("Scheduled", "Pending", "Crashed"), 1, None),
        ((*KILLED, "Scheduled", "Pending", "Crashed"), 1, None),
        (("Scheduled", "Pending", "Running", "Cancelling", "Crashed"), 1, None),
        (("Scheduled", "Pending", "Running", "AwaitingRetry", "Crashed"), 1, 2),
        ((*KILLED, *AGAIN), 1, 1),
        ((*KILLED, *AGAIN, *AGAIN), 1, 0),
        ((*KILLED, *AGAIN, *AGAIN), 10, 1),
        ((*KILLED, "RESTARTED", "Pending", "Running"), 1, None),
    ],
)
def test_killed_runs_are_restarted_twice_an_hour(names: tuple[str, ...], minutes: float, expected: int | None) -> None:
    assert restarts_left(states(*names, minutes=minutes)[::-1], NOW, 2) == expected


def deployed(client: Any, pool: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Any:
    """The id of a deployment in a work pool of its own, which is the project's for this test."""
    from prefect import flow
    from prefect.client.schemas.actions import WorkPoolCreate

    def work() -> None: ...

    monkeypatch.setattr("flows.local.worker.POOL", pool)
    client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    where = {"work_pool_name": pool, "entrypoint": "work.py:work"}
    return client.create_deployment(client.create_flow(flow(work)), name=pool, **where, **more)


def set_states(client: Any, run_id: Any, *states: Callable[[], Any]) -> None:
    for state in states:
        client.set_flow_run_state(run_id, state(), force=True)


def run_through(client: Any, deployment: Any, *states: Callable[[], Any]) -> Any:
    """A new run of a deployment, taken through these states; its id."""
    made = client.create_flow_run_from_deployment(deployment).id
    set_states(client, made, *states)
    return made


@pytest.mark.slow
def test_a_killed_run_is_scheduled_again_and_no_other(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow, task
    from prefect.states import Cancelling, Crashed, Failed, Pending, Running

    with api_client(prefect_api) as client:
        run = partial(run_through, client, deployed(client, "restarts", monkeypatch), Pending, Running)

        def nothing() -> None: ...

        long_ago = run(Crashed)
        since = datetime.now(UTC)
        killed, failed, cancelled = run(Crashed), run(Failed), run(Cancelling, Crashed)
        placeholder = client.create_task_run(task(nothing), killed, dynamic_key="0")
        part = client.create_flow_run(flow(nothing), parent_task_run_id=placeholder.id, state=Running()).id
        supervisor = Supervisor(client, tmp_path, since, 1)
        supervisor.look()

        def state(run_id: Any) -> Any:
            present = client.read_flow_run(run_id).state
            return present.type.value, present.message == RESTARTED

        assert state(killed) == ("SCHEDULED", True) and state(part)[0] == "CRASHED"
        assert {state(other)[0] for other in (long_ago, cancelled)} == {"CRASHED"} and state(failed)[0] == "FAILED"
        set_states(client, killed, Pending, Running, Crashed)
        supervisor.look()
        supervisor.look()
        assert state(killed) == ("CRASHED", False), "once an hour is enough"


@pytest.mark.slow
def test_a_cancelled_run_that_nobody_ends_is_ended(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker has gone, or ignores a second cancellation."""
    from prefect.states import Cancelling, Running

    monkeypatch.setattr("flows.local.worker.IGNORED", timedelta(0))
    monkeypatch.setattr("flows.local.worker.POLL_SECONDS", 0.0)
    with api_client(prefect_api) as client:
        deployment = deployed(client, "ignored", monkeypatch)
        run = client.create_flow_run_from_deployment(deployment).id
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(command, env={**os.environ, "PREFECT__FLOW_RUN_ID": str(run)}) as process:
            client.set_flow_run_state(run, Running(), force=True)
            client.update_flow_run(run, infrastructure_pid=str(process.pid))
            supervisor = Supervisor(client, tmp_path, datetime.now(UTC), 1)
            supervisor.look()
            assert process.poll() is None, "it was not cancelled"
            client.set_flow_run_state(run, Cancelling(), force=True)
            supervisor.look()
            assert not psutil.pid_exists(process.pid)  # psutil has waited for it
        assert client.read_flow_run(run).state.name == "Cancelled"


@pytest.mark.slow
def test_a_crashed_run_is_scheduled_again_once_its_process_has_ended(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.states import Crashed, Running

    with api_client(prefect_api) as client:
        supervisor = Supervisor(client, tmp_path, datetime.now(UTC), 1)
        run = client.create_flow_run_from_deployment(deployed(client, "ending", monkeypatch)).id
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(command, env={**os.environ, "PREFECT__FLOW_RUN_ID": str(run)}) as process:
            client.update_flow_run(run, infrastructure_pid=str(process.pid))
            set_states(client, run, Running, Crashed)
            supervisor.look()
            assert client.read_flow_run(run).state.is_crashed()
            process.kill()
        supervisor.look()
        assert client.read_flow_run(run).state.message == RESTARTED


@pytest.mark.slow
def test_a_paused_run_that_was_killed_is_noticed(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suspended one has no process."""
    from prefect.states import Paused, Running, Suspended

    with api_client(prefect_api) as client:
        deployment = deployed(client, "paused", monkeypatch)
        runs = [client.create_flow_run_from_deployment(deployment).id for _ in range(2)]
        for run, state in zip(runs, (Paused, Suspended), strict=True):
            client.set_flow_run_state(run, Running(), force=True)
            client.set_flow_run_state(run, state(timeout_seconds=600), force=True)
            client.update_flow_run(run, infrastructure_pid=str(2**22 + 1))
        supervisor = Supervisor(client, tmp_path, datetime.now(UTC), 1)
        for _ in range(2):
            supervisor.look()
        assert [client.read_flow_run(run).state.name for run in runs] == ["Scheduled", "Suspended"]


@pytest.mark.slow
def test_a_run_that_has_ended_keeps_its_state(prefect_api: str) -> None:
    """It was at work when `down` asked it to end, and completed before. A worker notes a cancelled one as crashed.
    Subflows that crashed in an earlier attempt, or below a run that completed, were not cancelled."""
    from prefect import flow, task
    from prefect.states import Cancelling, Completed, Crashed, Failed, Running

    def work() -> None: ...

    with api_client(prefect_api) as client:

        def run(*states: Callable[[], Any], parent: Any = None) -> Any:
            placeholder = client.create_task_run(task(work), parent.id, uuid4().hex).id if parent else None
            seen = client.create_flow_run(flow(work), parent_task_run_id=placeholder, state=Running())
            for state in states:
                client.set_flow_run_state(seen.id, state(), force=True)
            return seen

        runs = [run(Completed), run(Failed), run(Cancelling, Crashed), run(Cancelling), run()]
        before = [run(Crashed, parent=runs[0]), run(Crashed, parent=runs[-1])]
        client.set_flow_run_state(runs[-1].id, Running(), force=True)
        now = [run(Crashed, parent=runs[-1]), run(parent=runs[-1])]
        mark_ended(client, runs, "Cancelled", "`trinity down` has ended it")
        names = [client.read_flow_run(run.id).state.name for run in runs]
        assert names == ["Completed", "Failed", "Cancelled", "Cancelled", "Cancelled"]
        assert [client.read_flow_run(run.id).state.name for run in before + now] == ["Crashed"] * 2 + ["Cancelled"] * 2


@pytest.mark.slow
def test_runs_of_another_folder_s_worker_are_left_alone(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes may be another machine's: one that is not found here is not gone."""
    from prefect.states import Running

    with api_client(prefect_api) as client:
        deployment = deployed(client, "shared", monkeypatch)
        run = client.create_flow_run_from_deployment(deployment).id
        client.set_flow_run_state(run, Running(), force=True)
        client.update_flow_run(run, infrastructure_pid=str(2**22 + 1))
        supervisor = Supervisor(client, tmp_path, datetime.now(UTC), 0)
        for name, state in (("elsewhere", "Running"), (worker_name(tmp_path), "Crashed")):
            monkeypatch.setattr(
                client, "read_workers_for_work_pool", lambda _, name=name: [SimpleNamespace(name=name, status="ONLINE")]
            )
            assert pool_is_shared(client, tmp_path) == (name == "elsewhere")
            supervisor.look()
            supervisor.look()
            assert client.read_flow_run(run).state.name == state


@pytest.mark.slow
def test_runs_that_a_power_cut_killed_crash_and_free_their_slots(
    prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's database has them as running. The second one is a subflow of the first, the third has nothing to do
    with the work pool."""
    from prefect import flow, task
    from prefect.states import Pending, Running

    def nothing() -> None: ...

    with api_client(prefect_api) as client:
        deployment = deployed(client, "power", monkeypatch, concurrency_limit=1)
        killed, following = [
            client.create_flow_run_from_deployment(deployment, name=name) for name in ("killed", "new")
        ]
        for state in (Pending(), Running()):
            client.set_flow_run_state(killed.id, state)
        placeholder = client.create_task_run(task(nothing), killed.id, dynamic_key="0")
        subflow = client.create_flow_run(flow(nothing), parent_task_run_id=placeholder.id, state=Running())
        another = client.create_flow_run(flow(nothing), state=Running())
        assert client.set_flow_run_state(following.id, Pending()).status.value == "REJECT"
        said: list[str] = []
        write_atomically(make_state_dir(tmp_path) / key_file().name, os.environ["PREFECT_API_AUTH_STRING"].encode())
        _mark_left_runs(tmp_path, prefect_api, said.append, again=False)
        assert [line for line in said if line.startswith("The run killed was killed. `prefect flow-run retry")] == said
        states = [client.read_flow_run(run.id).state.name for run in (killed, subflow, another)]
        assert states == ["Crashed", "Crashed", "Running"]
        assert client.set_flow_run_state(following.id, Pending()).status.value == "ACCEPT"
