"""The list of runs: Prefect's, MLflow's and Studio's own as one; what may be done with each; how flows are started."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from studio.actions import Action, hindrance, perform, side_launch
from studio.prefect_runs import FlowRunSeen
from studio.run_list import PREFECT_STATES, RunRow, RunState, run_rows
from studio.settings import studio_settings
from studio.started_processes import Launch, StartedProcess, start_process, started_processes
from studio.tracked_runs import TrackedRun

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def flow_run(name: str, kind: str = "COMPLETED", minutes: int = 0, **more: object) -> FlowRunSeen:
    """A run of a deployment of the flow `rft`, begun some minutes after noon."""
    run = FlowRunSeen(
        id=f"flow run {name}",
        title=f"p/{name}",
        flow="rft",
        state=kind.title(),
        kind=kind,
        began=NOON + timedelta(minutes=minutes),
        ended=NOON + timedelta(minutes=minutes + 2),
        deployment="1",
        parameters={"config": "my.yaml", "overrides": ["seed=1"]},
        tags={"project": "p", "name": name},
    )
    return replace(run, **more)  # type: ignore[arg-type]


def tracked(name: str, status: str = "FINISHED", minutes: int = 0, parent: str = "") -> TrackedRun:
    began = NOON + timedelta(minutes=minutes)
    return TrackedRun(f"mlflow {name}", "1", "p", name, status, Path(f"/c/p/{name}"), began, began, parent)


def process(name: str, pid: int = 2**22 + 1, minutes: float = 0, flow: str = "rft") -> StartedProcess:
    """A process of Studio's; by default one that is no more."""
    started = (NOON + timedelta(minutes=minutes)).timestamp()
    return StartedProcess(pid, started, Launch(flow, "my.yaml"), "p", name, f"/logs/{name}_{minutes}")


@pytest.fixture
def living() -> StartedProcess:
    sleeping = Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield replace(process("one", sleeping.pid), started=psutil.Process(sleeping.pid).create_time())
    sleeping.kill()
    sleeping.wait(30)


def test_newest_runs_come_first_and_those_that_wait_before_them() -> None:
    waiting = flow_run("waits", "SCHEDULED", began=None, ended=None)
    rows = run_rows([flow_run("one"), flow_run("two", minutes=5), waiting], [tracked("three", minutes=3)], [])
    assert [row.title for row in rows] == ["p/waits", "p/two", "p/three", "p/one"]


def test_a_flow_run_is_shown_once_with_what_mlflow_has_of_it() -> None:
    [row] = run_rows([flow_run("one")], [tracked("one")], [])
    assert row.tracked == tracked("one") and row.state is RunState.DONE
    assert row.seconds(NOON) == 120.0
    assert row.launch == Launch("rft", "my.yaml", ("seed=1",))


def test_stages_stand_below_their_pipeline() -> None:
    parent = flow_run("all", flow="pipeline")
    stages = [flow_run(f"all_{name}", minutes=at, parent=parent.id) for name, at in (("rft", 2), ("sft", 1))]
    rows = run_rows([flow_run("later", minutes=9), parent, *stages], [], [])
    assert [(row.title, row.depth) for row in rows] == [
        ("p/later", 0), ("p/all", 0), ("p/all_sft", 1), ("p/all_rft", 1),
    ]  # fmt: skip


def test_runs_of_mlflow_alone_are_nested_too() -> None:
    rows = run_rows([], [tracked("all_sft", minutes=1, parent="mlflow all"), tracked("all")], [])
    assert [(row.title, row.depth) for row in rows] == [("p/all", 0), ("p/all_sft", 1)]


@pytest.mark.parametrize("kind", PREFECT_STATES)
def test_every_state_of_prefect_has_a_word(kind: str) -> None:
    from prefect.client.schemas.objects import StateType

    assert {*PREFECT_STATES} == {each.value for each in StateType}
    [row] = run_rows([flow_run("one", kind)], [], [])
    assert row.state is PREFECT_STATES[kind]


def test_a_process_belongs_to_the_flow_run_that_began_after_it() -> None:
    runs = [flow_run("one", minutes=at, id=str(at), deployment="") for at in (1, 5)]
    rows = run_rows(runs, [], [process("one", minutes=4.5), process("one", minutes=0.5)])
    assert {row.key: row.process.started for row in rows if row.process} == {
        "1": process("one", minutes=0.5).started,
        "5": process("one", minutes=4.5).started,
    }


def test_a_process_that_lives_is_running_whatever_mlflow_says(living: StartedProcess) -> None:
    [row] = run_rows([], [tracked("one", "FINISHED")], [living])
    assert row.state is RunState.RUNNING and row.process == living and row.ended is None
    [row] = run_rows([], [tracked("one", "RUNNING")], [process("one")])
    assert row.state is RunState.KILLED
    [row] = run_rows([], [tracked("one", "KILLED")], [process("one")])
    assert row.state is RunState.CANCELLED, "that is how a cancellation is recorded there"


def test_a_process_that_ended_before_its_run_says_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text("begins\nerror: the port is taken\n\n")
    [row] = run_rows([], [], [replace(process("one"), log=str(log))])
    assert row.state is RunState.ENDED and row.detail == "error: the port is taken"


def allowed(row: RunRow) -> set[Action]:
    return {action for action in Action if not hindrance(action, row)}


def test_what_may_be_done_with_a_run(living: StartedProcess) -> None:
    going = [tracked("one", "RUNNING")]
    rows = {
        "running": run_rows([flow_run("one", "RUNNING")], going, []),
        "done": run_rows([flow_run("one")], [tracked("one")], []),
        "waiting": run_rows([flow_run("one", "SCHEDULED")], [], []),
        "by a command": run_rows([flow_run("one", "RUNNING", deployment="")], going, []),
        "by Studio": run_rows([], going, [living]),
        "of MLflow": run_rows([], [tracked("one")], []),
    }
    found = {name: allowed(row) for name, [row] in rows.items()}
    both = {Action.EVALUATE, Action.CONVERT}
    assert found == {
        "running": {Action.CANCEL} | both,
        "done": {Action.RETRY} | both,
        "waiting": {Action.CANCEL},
        "by a command": both,
        "by Studio": {Action.CANCEL} | both,
        "of MLflow": {Action.CONVERT},
    }


def test_stages_are_evaluated_but_cancelled_with_their_pipeline() -> None:
    parent = flow_run("all", "RUNNING", flow="pipeline")
    stage = flow_run("all_rft", "RUNNING", parent=parent.id, parameters={"config": "my.yaml", "stage": "rft"})
    above, below = run_rows([parent, stage], [tracked("all"), tracked("all_rft")], [])
    assert allowed(above) == {Action.CANCEL} and "stage" in hindrance(Action.EVALUATE, above)
    assert allowed(below) == {Action.EVALUATE, Action.CONVERT}
    assert side_launch(Action.EVALUATE, below).parameters == {
        "config": "my.yaml", "overrides": [], "stage": "rft", "which": "missing",
    }  # fmt: skip
    assert side_launch(Action.CONVERT, below).command == ["convert", "--checkpoint-dir", "/c/p/all_rft"]


def test_a_launch_as_a_command_and_as_parameters() -> None:
    launch = Launch("rft", "my.yaml", ("seed=1",))
    assert launch.command == ["run", "--config", "my.yaml", "seed=1"]
    assert launch.parameters == {"config": "my.yaml", "overrides": ["seed=1"]}
    assert Launch("evaluate", "my.yaml", ("seed=1",), stage="rft", which="all").command == [
        "evaluate", "--config", "my.yaml", "--which", "all", "--stage", "rft", "seed=1",
    ]  # fmt: skip


def test_a_process_is_started_recorded_and_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr("studio.started_processes.TRINITY", [sys.executable, "-c", "import time; time.sleep(600)"])
    settings = studio_settings([])
    started = start_process(Launch("rft", "my.yaml", ("seed=1",)), "p", "one", settings)
    try:
        assert started_processes(settings.state) == [started] and started.alive()
        [row] = run_rows([], [], [started])
        assert "saves" in perform(Action.CANCEL, row, settings)
        psutil.wait_procs([psutil.Process(started.pid)] if started.alive() else [], timeout=30)
        assert not started.alive()
    finally:
        if started.alive():
            psutil.Process(started.pid).kill()
