"""Flows on Prefect and Ray, with light actors: what is shown, retried, not retried."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
import standins

from trinity_core.base.errors import TrinityError
from trinity_core.data.tiny import TinyFolders
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.run import attempt as run_attempt
from trinity_core.run import configuration
from trinity_core.run.configuration import load_checked
from trinity_core.run.driver import early_cluster

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


REPLACED = ("start_engines", "start_explorer", "start_trainers", "keep")


@pytest.fixture(autouse=True)
def model_and_data_beside_the_run(tmp_path: Path, tiny_folders: TinyFolders) -> None:
    """What `written` names. Runs look at both before they start anything."""
    (tmp_path / "model").symlink_to(tiny_folders.model)
    (tmp_path / "data").symlink_to(tiny_folders.data)


@pytest.fixture(autouse=True)
def real_ones_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `use_standins` replaces is put back after each test."""
    import trinity_core.exchange.checkpoints.convert
    from trinity_core.hosting.actors import Actors

    for name in REPLACED:
        monkeypatch.setattr(Actors, name, getattr(Actors, name))
    convert = trinity_core.exchange.checkpoints.convert
    monkeypatch.setattr(convert, "convert_all", convert.convert_all)


def use_standins(fault: str = "") -> None:
    """Light actors in place of the real ones, and no engines, in this process from now on."""
    import trinity_core.exchange.checkpoints.convert
    from trinity_core.hosting.actors import Actors

    paths = {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}

    def explorer(run: Any, *_: Any) -> Any:
        name = f"{run.config.name}/explorer"
        return run.cluster.actor(standins.Explorer, name, run.config, env=paths, concurrency=4)

    def trainers(run: Any) -> list[Any]:
        name = f"{run.config.name}/trainer"
        return [run.cluster.actor(standins.Trainer, name, run.config, fault, env=paths, concurrency=4)]

    for name, standin in zip(REPLACED, (lambda _: [], explorer, trainers, lambda *_: []), strict=True):
        setattr(Actors, name, standin)
    trinity_core.exchange.checkpoints.convert.convert_all = standins.convert


def written(folder: Path, name: str) -> Path:
    tasks = {"path": str(folder / "data"), "format": {"prompt_key": "question", "response_key": "answer"}}
    config = {
        "project": "tests",
        "name": name,
        "checkpoint_root_dir": str(folder),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "model": {"model_path": str(folder / "model"), "max_model_len": 64, "max_response_tokens": 16},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 2,
            "total_steps": standins.STEPS,
            "explorer_input": {"taskset": tasks, "eval_tasksets": [{"name": "test", "split": "test", **tasks}]},
        },
        "monitor": {"monitor_type": "tensorboard"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(config))
    return path


def parts(folder: Path, name: str) -> list[str]:
    """The configurations of a trainer and an explorer of one run."""
    files = []
    for mode in ("train", "explore"):
        path = folder / f"{name}_{mode}.yaml"
        alone = {"mode": mode, "synchronizer": {"sync_method": "checkpoint"}}
        path.write_text(json.dumps(json.loads(written(folder, name).read_text()) | alone))
        files.append(str(path))
    return files


def subflows(state: Any) -> list[Any]:
    """The flow runs below one that has ended in that state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter

    of_ours = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [state.state_details.flow_run_id]}})
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_run_filter=of_ours)


def attempts(job_dir: Path) -> list[int]:
    return [json.loads(line)["from"] for line in (job_dir / "attempts.jsonl").read_text().splitlines()]


@contextmanager
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Prefect's loggers, which pass nothing on, are heard too."""
    from prefect.logging.configuration import setup_logging

    setup_logging()  # what the first flow does, and then removes other handlers
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def ray_is_gone(seconds: float = 20) -> bool:
    """Whether no process of Ray is left below this one; it may take them a moment to go."""
    names = ("raylet", "gcs_server")
    family = [process for process in psutil.Process().children(recursive=True) if process.name() in names]
    return not psutil.wait_procs(family, timeout=seconds)[1]


@pytest.fixture(scope="module")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for many runs, as the stages of a pipeline have it."""
    with early_cluster(load_checked(str(written(tmp_path_factory.mktemp("shared"), "shared")))):
        yield
    assert ray_is_gone()


def test_a_run_shows_what_it_does(
    tmp_path: Path,
    prefect_api: str,
    shared_ray: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`trinity run` fails; `prefect flow-run retry ID --entrypoint flows.rft.rft` starts the same run again."""
    from prefect.cli.flow_run import retry
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        ArtifactFilter,
        ArtifactFilterKey,
        FlowRunFilter,
        LogFilter,
        TaskRunFilter,
    )
    from prefect.logging.handlers import APILogHandler

    from flows.evaluate import evaluate
    from flows.loaded import Loaded, run_flow

    use_standins()
    file = written(tmp_path, "whole")
    with monkeypatch.context() as wrong, pytest.raises(TrinityError):
        wrong.setattr("trinity_core.run.driver.resume", mock.Mock(side_effect=TrinityError("in progress")))
        run_flow("rft", Loaded(load_checked(file, ["seed=7"]), str(file), ["seed=7"], is_ready=True))
    ours = [record for record in caplog.records if "in progress" in record.getMessage()]
    assert {record.name for record in ours} == {"prefect.task_runs"}, "the flow's error is the command's last line"
    named = FlowRunFilter.model_validate({"name": {"any_": ["tests/whole"]}})
    with get_client(sync_client=True) as client:
        (failed,) = client.read_flow_runs(flow_run_filter=named)
        assert failed.state.is_failed() and failed.parameters["overrides"] == ["seed=7"]
        with pytest.raises(SystemExit):
            asyncio.run(retry(str(failed.id), entrypoint="flows.rft.rft"))
        APILogHandler().flush()
        run = client.read_flow_run(failed.id)
        assert run.state.is_completed() and run.run_count == 2 and run.name == "tests/whole · attempt 2"
        logs = client.read_logs(LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}}))
        assert any(line.name.startswith("trinity_core.run") for line in logs)
        summary = json.loads((tmp_path / "tests/whole/summary.json").read_text())
        assert summary["step"] == standins.STEPS and summary["score"] == 0.56
        assert {"project:tests", "name:whole", "stage:rft", "algorithm:grpo"} <= set(run.tags)
        task_runs = client.read_task_runs(task_run_filter=TaskRunFilter(flow_run_id={"any_": [str(run.id)]}))
        names = {task_run.name for task_run in task_runs} - {"doctor, train step 1"}  # if the run takes long enough
        assert names == {"resolve", "cluster", "explore", "train", "evaluate", "publish", "doctor, end"}
        ours = ArtifactFilter(key=ArtifactFilterKey(like_="tests-whole-"))
        keys = {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=ours)}
    assert set(keys) == {"tests-whole-curve", "tests-whole-summary", "tests-whole-rollouts"}
    assert {artifact.flow_run_id for artifact in keys.values()} == {run.id}
    assert keys["tests-whole-curve"].task_run_id is None
    assert keys["tests-whole-curve"].data.startswith("![Learning curve](data:image/png;base64,")
    shown, titles = keys["tests-whole-summary"].data, [artifact.description for artifact in keys.values()]
    assert f"trinity view --checkpoint-dir {tmp_path / 'tests/whole'}" in shown and "**trainer**" in shown
    assert "0.560" in shown and "None" not in shown
    assert all(f"step {standins.STEPS}" in title for title in titles), titles
    monkeypatch.setattr(run_attempt, "huggingface_folder", lambda config, step, merge: tmp_path / "model")
    scored = evaluate(str(file), ["seed=7"], which="missing")
    assert scored["scores"] == {"step 2": 0.52, "step 4": 0.54, "step 6": 0.56}, "the sweep scores what has no score"
    assert [line.step for line in read_metrics(tmp_path / "tests/whole") if line.source == "eval"].count(6) == 1


def run_pipeline(folder: Path, name: str, stages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The summary of a pipeline of these stages, with light actors, that starts over where their folders are taken."""
    from flows.pipeline import pipeline

    use_standins()
    monkeypatch.setattr(run_attempt, "huggingface_folder", lambda config, step, merge: folder / "model")
    path = written(folder, name)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stages": stages, "continue_from_checkpoint": False}))
    load = mock.Mock(wraps=configuration.load_config)
    monkeypatch.setattr(configuration, "load_config", load)
    summary = pipeline(config=str(path))
    assert load.call_count == 1, "each stage gets the configuration as a value"
    return summary


def kinds_of_inputs(api_url: str) -> set[str]:
    """Where the arguments of all task runs come from. Prefect's page lists no task at all if one has a flow run's
    result among them ("Invalid TaskInputResponse", PrefectHQ/prefect 18680)."""
    user, password = os.environ["PREFECT_API_AUTH_STRING"].split(":")
    with httpx.Client(base_url=f"{api_url}/", timeout=60, auth=(user, password)) as client:
        tasks = client.post("task_runs/filter", json={"limit": 200, "sort": "EXPECTED_START_TIME_DESC"}).json()
    assert tasks
    return {one["input_type"] for task in tasks for inputs in task["task_inputs"].values() for one in inputs}


def own_log(name: str) -> list[str]:
    """What a flow run of this name has logged, without its subflows."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, LogFilter
    from prefect.logging.handlers import APILogHandler

    APILogHandler().flush()
    with get_client(sync_client=True) as client:
        named = FlowRunFilter.model_validate({"name": {"any_": [name]}})
        (run,) = (run for run in client.read_flow_runs(flow_run_filter=named) if run.parent_task_run_id is None)
        own = LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}})
        return [line.message for line in client.read_logs(own)]


def test_a_pipeline_has_stages_of_every_kind(
    tmp_path: Path, prefect_api: str, shared_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that explores, one that only evaluates, and a last one without an explorer, which is scored after it. It
    starts over beside an earlier run."""
    columns = {"prompt_key": "question", "response_key": "answer"}
    answers = {"path": str(tmp_path / "data"), "split": "sft", "format": columns}
    buffer = {"train_batch_size": 2, "trainer_input": {"experience_buffer": answers}}
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}, "buffer": buffer}
    stages = [{"stage_name": "tune", "mode": "both"}, {"stage_name": "bench", "mode": "bench"}, sft]
    earlier = tmp_path / "tests" / "every_sft"
    earlier.mkdir(parents=True)
    (earlier / "notes.txt").touch()
    summary = run_pipeline(tmp_path, "every", stages, monkeypatch)
    assert kinds_of_inputs(prefect_api) <= {"parameter", "constant", "task_run"}
    lines = own_log(f"tests/{summary['name']}")
    assert [line for line in lines if f"step {standins.STEPS} of {standins.STEPS}" in line], "that of its stages"
    assert len([line for line in lines if "Beginning subflow run" in line]) == 5, "told once"
    results, state = lines[-2:]
    assert "Finished in state" in state and "base score: 0.500, tune: 0.560, bench: 0.500, sft: 0.560" in results
    assert summary["hf_dir"] in results and f"/runs?run=tests%2F{summary['name']}" in results, "`--watch` prints it"
    scores = {"before": 0.5, "tune": 0.56, "bench": 0.5, "sft": 0.56}
    assert summary["scores"] == scores, "the stand-in scores by the step alone"
    assert summary["steps"] == {"tune": standins.STEPS, "bench": 0, "sft": standins.STEPS}
    assert [path.name for path in earlier.iterdir()] == ["notes.txt"], "the run has a folder of its own, and was scored"


def test_parts_beside_each_other_recover_alone(
    tmp_path: Path, prefect_api: str, shared_ray: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer's worker dies, of which the explorer hears nothing; then the head of Ray, on which both work."""
    from flows.rft_async import rft_async

    use_standins(fault="die, then head")
    files = parts(tmp_path, "beside")
    with heard(caplog):
        state = rft_async(files, ["explorer.name=patient"], return_state=True)
    steps = {name: part["step"] for name, part in state.result().items()}
    assert steps["trainer"] == standins.STEPS and steps.keys() == {"trainer", "patient"}
    assert attempts(tmp_path / "tests/beside") == [0, 2, 4]
    runs = subflows(state)
    assert {run.state_type.value for run in runs} == {"COMPLETED"}
    # An explorer that had ended before it heard that the trainer had gone back explores again, as a run of one attempt.
    assert [run.run_count for run in runs if run.run_count > 1] == [2, 2] and len(runs) <= 3
    assert {run.parameters["config"] for run in runs} == {*files}, "by which Studio evaluates a part"
    assert caplog.text.count("the trainer returns to its latest checkpoint (1 of 3): trainer (Trainer, process") == 1
    # Whichever is seen first: Ray's end, or that of an actor that went with it.
    assert "Start the same run again" in caplog.text or "Ray has died" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("model", ["", "model"])
def test_a_wrong_configuration_fails_at_once(tmp_path: Path, prefect_api: str, model: str) -> None:
    """And names the run, which `--watch` prints where it doesn't print the state's message."""
    from prefect import get_client

    from flows.rft import rft

    path = written(tmp_path, "wrong")
    state = rft(config=str(path), overrides=["bufer.batch_size=3"], model_path=model, return_state=True)
    assert state.is_failed() and "bufer" in state.message
    with get_client(sync_client=True) as client:
        assert "bufer" in client.read_flow_run(state.state_details.flow_run_id).name
        state = rft(config=str(path), name="bad", algorithm_type="grpoo", model_path=model, return_state=True)
        refused = client.read_flow_run(state.state_details.flow_run_id).name
    assert refused.startswith("tests/bad refused: algorithm.algorithm_type"), "as Studio reads it"
    assert not (tmp_path / "tests").exists()
