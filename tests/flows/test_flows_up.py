"""`trinity up` and `down` with a real server and worker: runs are saved, and a killed one runs again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port

from flows.local.commands import down, up
from flows.local.server import UpState
from flows.local.worker import POOL, pool_is_shared
from studio.prefect_runs import PrefectRuns
from tasks.prefect_api import api_client

pytestmark = pytest.mark.slow

FLOW = """
import os, pathlib, time
from prefect import flow

HERE = pathlib.Path(__file__).parent

@flow(name="work", retries=2)
def work():
    (HERE / f"begun_{os.getpid()}").touch()
    try:
        for _ in range(3000):
            time.sleep(0.02)
    finally:
        time.sleep(0.5)
        (HERE / "saved").touch()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a flow that saves when it is told to end. Nothing runs there afterwards.

    The machine is behind a proxy, which does not answer.
    """
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "prefect.yaml").touch()
    (tmp_path / "work.py").write_text(FLOW)
    monkeypatch.setattr(
        "flows.local.commands._prefect", lambda *args: None
    )  # pool and deployment: made here, in less time
    yield tmp_path
    down(tmp_path, print)


def deployed(client: Any, root: Path) -> Any:
    """The id of a deployment of which one run at a time may run."""
    from prefect.client.schemas.actions import WorkPoolCreate

    client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    flow = client.create_flow_from_name("work")
    there = {"prefect.deployments.steps.set_working_directory": {"directory": str(root)}}
    where = {"work_pool_name": POOL, "pull_steps": [there], "entrypoint": "work.py:work"}
    return client.create_deployment(flow, name="one", concurrency_limit=1, **where)


def killed_runs(client: Any, deployment: Any) -> dict[str, Any]:
    """What a power cut leaves in Prefect's database: runs that go on for ever. The second one is a subflow of the
    first, the third has nothing to do with the work pool."""
    from prefect import flow, task
    from prefect.states import Pending, Running

    def nothing() -> None: ...

    run = client.create_flow_run_from_deployment(deployment, name="killed")
    client.set_flow_run_state(run.id, Pending())
    client.set_flow_run_state(run.id, Running())
    placeholder = client.create_task_run(task(nothing), run.id, dynamic_key="0")
    subflow = client.create_flow_run(flow(nothing), parent_task_run_id=placeholder.id, state=Running())
    others = client.create_flow_run(flow(nothing), state=Running())
    return {"killed": run.id, "subflow": subflow.id, "another's": others.id}


def begun(root: Path, *before: int) -> int:
    """The id of the process in which the flow runs, once it does; not one of those before."""
    deadline = time.monotonic() + 120
    while True:
        new = {int(path.name.removeprefix("begun_")) for path in root.glob("begun_*")} - {*before}
        if new:
            return new.pop()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def cancel(runs: PrefectRuns, client: Any, run: Any) -> None:
    """Cancel a run as Studio does, and wait until the worker has ended it; by itself it would go on for a minute."""
    runs.cancel(str(run))
    deadline = time.monotonic() + 120
    while (state := client.read_flow_run(run).state.name) != "Cancelled":
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def pid(name: str, root: Path) -> int:
    """The process of that name which `trinity up` has started last."""
    state = UpState.load(root)
    assert state is not None
    return state.named(name)[0].pid


def wait_until_gone(process: int) -> None:
    gone, _ = psutil.wait_procs([psutil.Process(process)] if psutil.pid_exists(process) else [], timeout=60)
    assert gone or not psutil.pid_exists(process)


def test_a_killed_run_frees_its_slot_runs_again_and_saves(root: Path, prefect_api: str) -> None:
    """The database is that of the tests' own server, which knows the killed run's place; the new server does not."""
    said: list[str] = []
    with api_client(prefect_api) as client:
        deployment = deployed(client, root)
        runs = killed_runs(client, deployment)
        running = up(root, free_port(), said.append)
        assert running.api_url != prefect_api
        assert [line for line in said if line.startswith("The run killed was killed. `prefect flow-run retry")]
        states = {name: client.read_flow_run(run).state.name for name, run in runs.items()}
        assert states == {"killed": "Crashed", "subflow": "Crashed", "another's": "Running"}

        going = client.create_flow_run_from_deployment(deployment, name="going")
        studio, cancelled = PrefectRuns(running.api_url), [begun(root)]
        cancel(studio, client, going.id)
        studio.retry(str(going.id))
        cancelled.append(begun(root, *cancelled))
        *cancelled, first = cancelled
        (root / "saved").unlink()

        os.kill(first, signal.SIGKILL)
        second = begun(root, *cancelled, first)
        assert client.read_flow_run(going.id).run_count == 3
        worker = pid("worker", root)
        for process in (worker, second):
            os.kill(process, signal.SIGKILL)
        third = begun(root, *cancelled, first, second)
        assert pid("worker", root) != worker, "the supervisor has started another worker, which has taken the run"

        for name in ("supervisor", "worker"):
            os.kill(pid(name, root), signal.SIGKILL)
            wait_until_gone(pid(name, root))
        said.clear()
        again = up(root, free_port(), said.append)
        assert again.api_url == running.api_url
        assert {line.split()[2] for line in said if line.startswith("Starting")} == {"worker", "supervisor"}
        assert psutil.pid_exists(third) and client.read_flow_run(going.id).state.name == "Running"
        assert pool_is_shared(client, root / "another") and not pool_is_shared(client, root)
        said.clear()
        assert down(root, said.append)
        assert (root / "saved").exists()
        assert client.read_flow_run(going.id).state.name == "Cancelled"
        assert not client.read_work_pool(POOL).is_paused
    assert [line.split(":")[0] for line in said] == [
        "Stopping the supervisor …", "Cancelling the run going", "Stopping the worker …", "Stopping the server …",
    ]  # fmt: skip
