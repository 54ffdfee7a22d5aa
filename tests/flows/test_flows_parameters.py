"""Every deployment of prefect.yaml: its flow is there and takes the parameters that it gives, with all of its own."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from prefect.utilities.callables import parameter_schema_from_entrypoint
from prefect.utilities.schema_tools.validation import validate

from flows.cli import first_try
from flows.loaded import Loaded, load
from flows.pipeline import pipeline
from tasks.prefect_api import with_main_settings
from trinity_core.base.errors import TrinityError
from trinity_core.config import ConfigError, load_config, source, stages

ROOT = Path(__file__).parent.parent.parent
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def flow_of(deployment: dict[str, Any]) -> Any:
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_mission_s_deployments_are_there() -> None:
    names = {f"{flow_of(deployment).name}/{deployment['name']}" for deployment in DEPLOYMENTS}
    of_gsm8k = {f"{flow}/gsm8k" for flow in ("sft", "rft", "evaluate", "convert", "pipeline")}
    of_async = {f"rft/gsm8k-{part}" for part in ("explorer", "trainer", "async")}
    assert names >= {*of_gsm8k, *of_async, "evaluate/sweep"}


@pytest.mark.parametrize("made", [False, True])
def test_first_deployment_to_try_exists_and_needs_no_gpu(made, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if made:
        Path("runs/quickstart/model").mkdir(parents=True)
    *_, deployment, _ = first_try(gpus=False).split()
    assert ("trinity tiny" in first_try(gpus=False)) is not made
    names = {f"{flow_of(one).name}/{one['name']}": one for one in DEPLOYMENTS}
    assert names[deployment]["parameters"]["config"] == "configs/quickstart/quickstart.yaml"
    assert first_try(gpus=True).split()[3] in names


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["entrypoint"] + "/" + each["name"])
def test_form_can_be_submitted_unchanged(deployment: dict[str, Any]) -> None:
    """It sends the schema's defaults, and null for a field that was emptied."""
    schema = parameter_schema_from_entrypoint(deployment["entrypoint"]).model_dump()
    fields = schema["properties"].items()
    unchanged = {name: field["default"] for name, field in fields if "default" in field} | deployment["parameters"]
    emptied = {name: None for name, field in fields if "default" not in field}
    assert validate(unchanged, schema) == validate(emptied | unchanged, schema) == []


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["entrypoint"] + "/" + each["name"])
def test_a_worker_can_give_the_flow_all_its_parameters(deployment: dict[str, Any]) -> None:
    """As it does: those of the deployment over the flow's defaults, all checked by their types."""
    flow = flow_of(deployment)
    parameters = inspect.signature(flow.fn).parameters.values()
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }
    parameters = defaults | deployment["parameters"]
    assert flow.validate_parameters(parameters) == parameters
    assert all((ROOT / file).exists() for file in parameters.get("configs") or [parameters["config"]])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda each: each["entrypoint"] + "/" + each["name"])
def test_the_form_names_and_explains_every_parameter(deployment: dict[str, Any]) -> None:
    """In the schema that `prefect deploy` sends."""
    from prefect.utilities.callables import parameter_schema

    shown = parameter_schema(flow_of(deployment)).model_dump_for_openapi()["properties"]
    first = shown.get("config") or shown["configs"]
    assert first["title"] in ("Configuration", "Configurations")
    assert '"null"' not in json.dumps(shown), "the form would say that the property is of the type None"
    for name, each in shown.items():
        assert each["title"] != name and each["title"][0].isupper(), name
        assert len(each["description"]) > 10, name
    assert [field["position"] for field in shown.values()] == list(range(len(shown)))


def test_other_overrides_do_not_rewrite_the_quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They replace the deployment's own."""
    monkeypatch.setattr(
        "flows.pipeline.load", lambda file, overrides, opened: Loaded(load_config(file, overrides), "", ())
    )
    monkeypatch.setattr("flows.pipeline.run_pipeline", lambda config, *_: {"name": config.name})
    monkeypatch.setattr("flows.pipeline.log_results", lambda config, summary: None)
    [quickstart] = [
        one["parameters"] for one in DEPLOYMENTS if flow_of(one) is pipeline and one["name"] == "quickstart"
    ]
    result = pipeline.fn(**quickstart | {"overrides": ["buffer.total_steps=10"]})
    assert result == {"name": "second"}


@pytest.mark.parametrize("wrong", [{"config": ""}, {"overrides": ["no value"]}, {"which": "newest"}, {"which": -1}])
def test_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    from prefect.exceptions import ParameterTypeError

    from flows.evaluate import evaluate

    with pytest.raises(ParameterTypeError, match=next(iter(wrong))):
        evaluate.validate_parameters({"config": "run.yaml", **wrong})


@pytest.mark.parametrize(
    "override",
    [
        "a=1", "a.b=1", " a.b = 1", "trainer.total_steps = 3", "stages[0].name=x", "stages.rft.name=",
        "explorer.env_vars.MY-X=1", "a=b=c", "", "a", "=1", " =1", ".=1", "[]=1",
    ],
)  # fmt: skip
def test_flows_accept_the_same_overrides_as_the_loader(override: str) -> None:
    from prefect.exceptions import ParameterTypeError

    from flows.rft import rft

    try:
        source.override(source.parse("stages: [{stage_name: rft}]"), [override])
    except ConfigError:
        with pytest.raises(ParameterTypeError):
            rft.validate_parameters({"config": "run.conf", "overrides": [override]})
    else:
        rft.validate_parameters({"config": "run.conf", "overrides": [override]})


@pytest.mark.parametrize(
    ("flow", "given"),
    [
        ("evaluate", {"which": 3}),
        ("evaluate", {"stage": 1}),
        ("evaluate", {"run": 20240101}),
        ("rft", {"name": 7}),
        ("sft", {"name": 20240101}),
        ("pipeline", {"name": 7}),
    ],
)
def test_a_name_of_digits_may_arrive_as_a_number(flow: str, given: dict[str, int]) -> None:
    """By the server, which checks them against the deployment's schema, and by the flow, which wants text."""
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools.validation import validate

    called = getattr(importlib.import_module(f"flows.{flow}"), flow)
    parameters = {"config": "run.yaml", **given}
    validate(parameters, parameter_schema(called).model_dump_for_openapi(), raise_on_error=True)
    taken = called.validate_parameters(parameters)
    assert {name: taken[name] for name in given} == {name: str(value) for name, value in given.items()}


@pytest.mark.parametrize(("wrong", "value"), [("lr", 0), ("lr", "fast"), ("batch_size", 0), ("repeat_times", 1.5)])
def test_wrong_main_settings_are_refused_before_a_run(wrong: str, value: Any) -> None:
    from prefect.exceptions import ParameterTypeError

    from flows.rft import rft

    with pytest.raises(ParameterTypeError, match=wrong):
        rft.validate_parameters({"config": "run.yaml", wrong: value})


def test_main_settings_become_overrides_and_empty_ones_do_not() -> None:
    config = str(ROOT / "configs/quickstart/quickstart.yaml")
    overrides = with_main_settings(["seed=7"], "rft", lr=2e-7, batch_size=4, total_steps=None)
    assert overrides == ["seed=7", "stages.rft.algorithm.optimizer.lr=2e-07", "stages.rft.buffer.batch_size=4"]
    warm_up, rft = stages(load_config(config, overrides))
    assert (rft.algorithm.optimizer.lr, rft.buffer.batch_size, rft.seed) == (2e-7, 4, 7)
    assert warm_up.algorithm.optimizer.lr != 2e-7
    assert load_config(config, with_main_settings([], "", name="实验 😀")).name == "实验 😀"
    assert with_main_settings([], "rft", name="mine", lr=0.1) == [
        'name="mine"',
        "stages.rft.algorithm.optimizer.lr=0.1",
    ]
    assert with_main_settings(["a=1"], "", lr=None) == ["a=1"]


def test_a_deployments_run_names_file_and_line_of_what_is_missing(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    taskset = "{batch_size: 4, total_steps: 1, explorer_input: {taskset: {path: /no/data}}}"
    file.write_text(f"model:\n  model_path: ${{oc.env:MY_MODEL,/no/model}}\n  max_model_len: 64\nbuffer: {taskset}\n")
    with pytest.raises(ConfigError) as caught:
        load(str(file), ["cluster.gpu_per_node=0"], opened=True)
    places = {(problem.key, problem.file, problem.line) for problem in caught.value.problems}
    assert ("model.model_path", str(file), 2) in places
    assert ("buffer.explorer_input.taskset.path", str(file), 4) in places
    with_way_out = {problem.key for problem in caught.value.problems if "set MY_MODEL" in problem.message}
    assert with_way_out == {"model.model_path"}
    assert repr(caught.value).count("\n") == str(caught.value).count("\n") > 0
    assert not load(str(file), ["cluster.gpu_per_node=0"]).is_ready


def test_a_run_is_called_by_project_and_name_from_the_start(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its flow does first may fail, or take a while."""
    from prefect.client.orchestration import get_client

    from flows.rft import rft

    for module in ("pipeline", "loaded"):
        monkeypatch.setattr(f"flows.{module}.load", mock.Mock(side_effect=TrinityError("too early")))
    config, data = str(ROOT / "configs/quickstart/quickstart.yaml"), ["stages.rft.model.model_path=/none"]
    states = [
        pipeline(config=config, overrides=["project=mine"], name="second", return_state=True),
        rft(config=config, overrides=data, stage="rft", return_state=True),
    ]
    with get_client(sync_client=True) as client:
        names = [client.read_flow_run(state.state_details.flow_run_id).name for state in states]
    assert names == ["mine/second", "Trinity-Flows/quickstart_rft"]


def test_a_refused_run_is_called_by_its_first_reason(tmp_path, prefect_api: str) -> None:
    """`prefect deployment run --watch` prints the name, and no message."""
    from prefect.client.orchestration import get_client

    from flows.rft import rft

    file = tmp_path / "run.yaml"
    file.write_text("model:\n  model_path: /no/model\n  max_model_len: many\n")
    state = rft(config=str(file), return_state=True)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(state.state_details.flow_run_id)
    assert run.state.is_failed() and run.name.startswith("run refused: buffer.explorer_input.taskset: ")
    assert len(run.name) < 100, "`prefect flow-run logs` prints it before each line"
    cut = run.name.partition(" …")[0].removeprefix("run refused: ")
    assert f"{cut} " in run.state.message, "the cut is between two words"
