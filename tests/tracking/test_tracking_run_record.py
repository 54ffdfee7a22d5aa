"""What a run says of itself beside its metrics, in its folder and on MLflow's page."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow_store import mlflow_client
from prefect.exceptions import TerminationSignal
from raising import raising

from trinity_core.base.addresses import page_note
from trinity_core.base.errors import DataError, TrinityError
from trinity_core.base.files import write_json
from trinity_core.config import config_from_dict, load_config, public_dict
from trinity_core.config.load import escaped
from trinity_core.config.secrets import MASK
from trinity_core.exchange.tracking.forwarder import Forwarder, open_writer
from trinity_core.exchange.tracking.metrics_file import MetricsFile, rewind
from trinity_core.exchange.tracking.mlflow_facts import DESCRIPTION
from trinity_core.exchange.tracking.mlflow_writer import describe_runs, run_note
from trinity_core.exchange.tracking.run_record import (
    RunState,
    changes_since,
    config_path,
    read_config,
    read_record,
    record_end,
    record_kill,
    record_path,
    record_start,
)
from trinity_core.exchange.tracking.writers import RunInfo, RunOutcome
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.nodes import software
from trinity_core.run.stage import Stage
from trinity_core.run.tracking_thread import TrackingThread

ENDS = (RunState.FINISHED, RunState.PAUSED, RunState.FAILED, RunState.CANCELLED)
"""In the order of `RunOutcome`."""


def test_a_run_records_its_configuration_state_and_end(tmp_path: Path) -> None:
    record_start(tmp_path, {"seed": 3, "monitor": {"monitor_args": {"password": "hidden"}}}, "rft")
    record = read_record(tmp_path)
    assert record is not None and record.present_state is RunState.RUNNING and record.stage == "rft"
    assert read_config(tmp_path) == {"seed": 3, "monitor": {"monitor_args": {"password": MASK}}}
    assert "hidden" not in (tmp_path / "monitor/config.yaml").read_text()
    for outcome, state in zip(RunOutcome, ENDS, strict=True):
        record_end(tmp_path, record_start(tmp_path, {}, "rft"), outcome)
        ended = read_record(tmp_path)
        assert ended is not None and ended.present_state is state and ended.ended is not None
    assert read_record(tmp_path / "none") is None and read_config(tmp_path / "none") == {}
    for damaged in (b"seed: [", b"\xfe\xff"):
        config_path(tmp_path).write_bytes(damaged)
        with raising(DataError, key=str(config_path(tmp_path))):
            read_config(tmp_path)
        assert changes_since(tmp_path, {"seed": 1}, "rft", {}) == "", "the run resumes"


@pytest.mark.parametrize("prompt", ["Use ${seed}", r"Use \${seed}", r"\\${HOME} and \$1 \\", "5 $"])
def test_a_run_can_be_started_from_its_recorded_configuration(tmp_path: Path, prompt: str) -> None:
    taskset = {"path": "x", "format": {"system_prompt": escaped(prompt)}}
    tree = {"model": {"model_path": "m", "max_model_len": 64}, "buffer": {"explorer_input": {"taskset": taskset}}}
    config = config_from_dict(tree)
    assert config.buffer.explorer_input.tasksets[0].format.system_prompt == prompt
    record_start(tmp_path, public_dict(config), "rft")
    assert changes_since(tmp_path, public_dict(config), "rft", {}) == ""
    assert load_config(config_path(tmp_path)).buffer == config.buffer
    [recorded] = read_config(tmp_path)["buffer"]["explorer_input"]["tasksets"]
    assert recorded["format"]["system_prompt"] == prompt


def test_state_of_a_newer_release_is_unknown(tmp_path: Path) -> None:
    record_path(tmp_path).parent.mkdir()
    write_json(record_path(tmp_path), {"state": "archived", "began": 100.0, "host": socket.gethostname()})
    record = read_record(tmp_path)
    assert record is not None and record.present_state is RunState.UNKNOWN


def test_resume_tells_of_other_software_and_of_settings_that_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values that are null count, and those that only one of both releases knows do not."""
    config = config_from_dict({
        "mode": "train", "checkpoint_root_dir": str(tmp_path), "algorithm": {"algorithm_type": "sft"},
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "data.jsonl"}}},
        "monitor": {"monitor_type": "tensorboard"},
    })  # fmt: skip
    own, settings = software(""), public_dict(config)

    def start() -> str:
        caplog.clear()
        tracking = TrackingThread(Stage(config, place(config, Machine(1, 0)), "sft"))
        assert tracking.writer() is not None
        tracking.close(RunOutcome.FINISHED)
        record = read_record(config.job_dir)
        assert record is not None and record.software == own
        return " ".join(line.getMessage() for line in caplog.records if line.name == TrackingThread.__module__)

    def start_after(settings: dict[str, Any], software: dict[str, str]) -> str:
        record_start(config.job_dir, settings, "sft", software=software)
        return start()

    assert [start(), start()] == ["", ""], "the first one, and the same again"
    before = settings | {"seed": 7, "gone": 1, "buffer": settings["buffer"] | {"total_steps": 9}}
    told = start_after(before, own | {"trinity_core": "0.0.9+4f1b2c", "torch": ""})
    assert "0.0.9+4f1b2c" in told and own["trinity_core"] in told and own["torch"] in told
    assert "seed (7" in told and "buffer.total_steps (9" in told
    assert "gone" not in told and own["ray"] not in told
    assert own["trinity_core"] in start_after(settings, {}), "an older release records none"


@pytest.mark.parametrize("folder", ["", "stage"])
def test_an_attempt_that_was_killed_took_until_its_last_metrics(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are rewound when it is resumed, and followed by evaluations; those of a pipeline are its stages'."""
    record_path(tmp_path).parent.mkdir()
    killed = {"state": "running", "began": 100.0, "earlier": 40.0, "host": socket.gethostname(), "pid": 2**22 + 1}
    write_json(record_path(tmp_path), killed)
    for source, step, now in (("trainer", 1, 110.0), ("explorer", 2, 130.0), ("eval", 1, 900.0)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            MetricsFile(tmp_path / folder, source).write(step, {"loss": 1.0})
    record_kill(tmp_path, [tmp_path / "stage"])
    assert rewind(tmp_path / folder, 1, lambda: {"explorer": 1}) == 1
    started = record_start(tmp_path, {}, "rft")
    assert started is not None and started.earlier == 70.0
    record_kill(tmp_path)
    assert read_record(tmp_path) == started, "this one is alive"


def test_a_failed_run_records_its_error_without_passwords(tmp_path: Path) -> None:
    """Errors of the project say what to do by themselves; others need their class. No other end has an error."""
    for outcome, error, text in (
        (RunOutcome.FAILED, DataError("postgresql://me:hidden@db is away"), f"postgresql://me:{MASK}@db is away"),
        (RunOutcome.FAILED, KeyError("a"), "KeyError: 'a'"),
        (RunOutcome.CANCELLED, KeyboardInterrupt(), ""),
    ):
        own = record_start(tmp_path, {}, "rft")
        with pytest.raises(type(error)):
            try:
                raise error
            finally:
                record_end(tmp_path, own, outcome)
        record = read_record(tmp_path)
        assert record is not None and record.error == text


@pytest.mark.parametrize("explorer_is_first", [True, False])
def test_explorer_and_trainer_of_one_process_leave_the_trainers_record(tmp_path: Path, explorer_is_first: bool) -> None:
    """The flow `rft_async` runs both; the explorer, and an evaluation, keep a record that is there."""
    starts = [("explore", True), ("train", False)]
    own = {
        stage: record_start(tmp_path, {}, stage, keeps)
        for stage, keeps in (starts if explorer_is_first else reversed(starts))
    }
    record_end(tmp_path, own["explore"], RunOutcome.FAILED)
    record = read_record(tmp_path)
    assert record is not None and (record.stage, record.present_state) == ("train", RunState.RUNNING)
    record_end(tmp_path, own["train"], RunOutcome.FINISHED)
    record = read_record(tmp_path)
    assert record is not None and record.present_state is RunState.FINISHED


def test_mlflow_says_where_else_a_run_is_and_what_data_it_used(root: Path, tmp_path_factory) -> None:
    data = tmp_path_factory.mktemp("data")
    (data / "train.jsonl").write_text('{"question": "1+1?"}\n')
    taskset = {"name": "sums", "path": str(data), "split": "train"}
    hub = {"name": "gsm8k", "path": "openai/gsm8k", "split": "test"}
    config = {
        "algorithm": {"algorithm_type": "grpo"}, "model": {"model_path": "/c/p/warm/global_step_7/actor/huggingface"},
        "buffer": {"explorer_input": {"tasksets": [taskset], "eval_tasksets": [hub]}},
    }  # fmt: skip
    write_json(page_note(root, "studio"), {"url": "http://127.0.0.1:4220"})
    info = RunInfo("p", "one", root / "p/one", config)
    record_start(info.job_dir, config, "rft")
    write_json(info.job_dir / "summary.json", {"score": 1.0})
    writer = open_writer("mlflow", info, root)
    Forwarder(info.job_dir, writer).close(RunOutcome.FINISHED)
    client = mlflow_client(root)
    run = client.get_run(writer.run_id)  # type: ignore[attr-defined]
    assert "http://127.0.0.1:4220/runs?run=p%2Fone" in run.data.tags[DESCRIPTION]
    assert f"algorithm grpo · model `warm step 7` · data `{data}`" in run.data.tags[DESCRIPTION]
    write_json(page_note(root, "studio"), {"url": "http://127.0.0.1:4221"})
    deleted = open_writer("mlflow", RunInfo("p", "deleted", root / "p/deleted", config), root)
    client.delete_run(deleted.run_id)  # type: ignore[attr-defined]
    describe_runs(root)
    described = client.get_run(writer.run_id).data.tags[DESCRIPTION]  # type: ignore[attr-defined]
    assert "http://127.0.0.1:4221/runs?run=p%2Fone" in described, "`trinity up` has another address now"
    inputs = {source.dataset.name: source for source in run.inputs.dataset_inputs}
    assert inputs["gsm8k"].dataset.digest == "openai/gsm8k" and inputs["gsm8k"].tags[0].value == "evaluation"
    first = inputs["sums"].dataset.digest
    assert len(first) == 8
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"config.yaml", "summary.json"}
    (data / "train.jsonl").write_text('{"question": "2+2?"}\n')
    other = open_writer("mlflow", RunInfo("p", "two", root / "p/two", config), root)
    [changed] = [
        source.dataset.digest
        for source in client.get_run(other.run_id).inputs.dataset_inputs  # type: ignore[attr-defined]
        if source.dataset.name == "sums"
    ]
    assert changed != first


def test_an_experiment_deleted_in_mlflow_stops_only_its_own_runs(root: Path) -> None:
    infos = [RunInfo(project, "n", root / project / "n") for project in ("gone", "here")]
    for info in infos:
        open_writer("mlflow", info, root).close(RunOutcome.FINISHED)
    client = mlflow_client(root)
    gone = client.get_experiment_by_name("gone").experiment_id
    client.delete_experiment(gone)
    write_json(page_note(root, "studio"), {"url": "http://127.0.0.1:4220"})
    describe_runs(root)
    here = run_note(infos[1].job_dir)["run_id"]
    assert "http://127.0.0.1:4220/runs" in client.get_run(here).data.tags[DESCRIPTION]
    with raising(TrinityError, key="project"):
        open_writer("mlflow", infos[0], root)
    client.restore_experiment(gone)
    open_writer("mlflow", infos[0], root).close(RunOutcome.FINISHED)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, RunOutcome.FINISHED),
        (TrinityError("no data"), RunOutcome.FAILED),
        (TimeoutError(), RunOutcome.FAILED),
        (KeyboardInterrupt(), RunOutcome.CANCELLED),
        (SystemExit(143), RunOutcome.CANCELLED),
        (TerminationSignal(15), RunOutcome.CANCELLED),
    ],
)
def test_only_a_cancellation_is_no_failure(error: BaseException | None, expected: RunOutcome) -> None:
    assert RunOutcome.of(error) is expected
