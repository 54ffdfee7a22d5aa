"""Stages as subflows: each is found again, names its file, and says how it ended."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.exceptions import CancelledRun
from prefect.runtime import flow_run

from flows.loaded import cancellable
from tasks import frontend
from tasks.frontend import PREFECT
from trinity_core.base.errors import DataError
from trinity_core.base.program import TERMINATED
from trinity_core.base.waits import poll
from trinity_core.config import load_config
from trinity_core.hosting.faults import CANCEL_TOKEN, CancelToken, ProcessLost, Stopped
from trinity_core.run.stage import StageRequest


def requests() -> list[StageRequest]:
    config = load_config("configs/quickstart/quickstart.yaml", ["project=tests", "name=run.1"])
    return [
        StageRequest(config, "evaluate", "sft", which="base"),
        StageRequest(config, "sft", "sft"),
        StageRequest(config, "rft", "rft"),
    ]


def test_each_stage_has_a_subflow_of_its_own(prefect_api: str) -> None:
    """Prefect finds the subflows of a flow that is started again by key and number: one key would mix up stages."""

    @flow
    def above(config: str, overrides: list[str], name: str) -> tuple[str, list[int]]:
        return flow_run.id, [PREFECT.subflow(request, lambda: 1) for request in requests()]

    parent, results = above("my.yaml", ["seed=1"], "run.1")
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [UUID(parent)]}))
        stages = [client.read_flow_run(task.state.state_details.child_flow_run_id) for task in tasks]
    assert results == [1, 1, 1] and len({task.task_key for task in tasks}) == 3
    assert {stage.parameters["stage"] for stage in stages} == {"sft", "rft"}
    assert {stage.name for stage in stages} == {"tests/run.1, base score", "tests/run.1_sft", "tests/run.1_rft"}
    files = [(stage.parameters["config"], stage.parameters["overrides"]) for stage in stages]
    assert files == [("my.yaml", ["seed=1", 'name="run.1"'])] * 3


def test_a_stage_depends_on_the_one_whose_model_it_takes(prefect_api: str) -> None:
    """In the graph on Prefect's page; also where a flow is started again after that stage."""
    base, sft, rft = requests()
    config = sft.config
    later = (
        replace(rft, model_path="hf"),
        StageRequest(config, "evaluate", "rft", which="latest", run="run.1_rft"),
    )

    @flow
    def above(config: str, overrides: list[str]) -> str:
        for request in (base, sft, *later):
            PREFECT.subflow(request, lambda: 1)
        return flow_run.id

    parent = above("my.yaml", [])
    with get_client(sync_client=True) as client:
        graph = client.request("GET", "/flow_runs/{id}/graph-v2", path_params={"id": parent}).json()
    nodes = {key: node["label"].partition(" / ")[0] for key, node in graph["nodes"]}
    parents = [{nodes[one["id"]] for one in node["parents"]} for _, node in graph["nodes"]]
    assert [*nodes.values()] == ["evaluate", "sft", "rft", "evaluate"]
    assert parents == [set(), set(), {"sft"}, {"rft"}]


def test_a_stopped_stage_raises_no_fault_of_an_earlier_attempt(
    prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect would, and could hide the error for which all parts are stopped."""
    monkeypatch.setitem(frontend.RETRIED, "retry_delay_seconds", 0)
    token, faults = CancelToken(), [ProcessLost("the first attempt's")]

    def stage() -> None:
        if faults:
            raise faults.pop()
        token.stop()
        token.raise_if_cancelled()

    @flow
    def above(config: str, overrides: list[str]) -> None:
        PREFECT.subflow(requests()[2], stage)

    before = CANCEL_TOKEN.set(token)
    try:
        with pytest.raises(Stopped):
            above("my.yaml", [])
    finally:
        CANCEL_TOKEN.reset(before)


def test_a_component_that_someone_else_cancels_has_no_result(prefect_api: str) -> None:
    def cancelled() -> int:
        raise CancelledRun("set in Prefect")

    @flow
    def above() -> None:
        PREFECT.run_components(CancelToken(), {"trainer": lambda: 1, "explorer": cancelled})

    with pytest.raises(CancelledRun):
        above()


def test_a_component_that_fails_for_good_ends_the_others(prefect_api: str) -> None:
    token, ended = CancelToken(), []

    def wrong_data() -> None:
        raise DataError("row 7 of train.jsonl has no answer")

    def works() -> None:
        for _ in poll(60):
            try:
                token.raise_if_cancelled()
            except Stopped:
                ended.append("saved")
                raise

    @flow
    def above() -> None:
        PREFECT.run_components(token, {"trainer": wrong_data, "explorer": works})

    with pytest.raises(DataError):
        above()
    assert ended == ["saved"]


@pytest.mark.parametrize(
    ("end", "state"),
    [(KeyboardInterrupt(), "CANCELLED"), (SystemExit(TERMINATED), "CANCELLED"), (SystemExit(1), "CRASHED")],
)
def test_only_a_signal_cancels_a_command(end: BaseException, state: str, prefect_api: str) -> None:
    """And its stage. The user's code may call `exit`."""
    runs = []

    @flow
    def stage() -> None:
        runs.append(UUID(flow_run.id))
        raise end

    @flow
    def command() -> None:
        runs.append(UUID(flow_run.id))
        stage()

    with pytest.raises(type(end)):
        cancellable(command)()
    with get_client(sync_client=True) as client:
        assert [client.read_flow_run(run).state.type.value for run in runs] == [state, state]
