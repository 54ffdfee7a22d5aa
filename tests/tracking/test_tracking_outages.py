"""A tracking system that is away for a while, or for good: the run continues, and its metrics are kept."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock
from urllib.request import urlopen

import pytest
import sqlalchemy.sql
from mlflow_store import mlflow_client
from ports import free_port
from test_tracking_forwarder import Recorder

from trinity_core.base.errors import TransientFault
from trinity_core.config import config_from_dict
from trinity_core.exchange.tracking import forwarder as forwarder_module
from trinity_core.exchange.tracking.forwarder import Forwarder, ForwarderThread, open_writer
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.mlflow_root import LOCK, default_uri, make_database
from trinity_core.exchange.tracking.mlflow_writer import open_client
from trinity_core.exchange.tracking.writers import RunInfo, RunOutcome
from trinity_core.hosting.placement import Machine, place
from trinity_core.run.stage import Stage
from trinity_core.run.tracking_thread import TrackingThread


def tracking(forwarder: Forwarder, seconds: float = 0.01) -> ForwarderThread:
    return ForwarderThread(forwarder.job_dir, lambda: forwarder, seconds)


def test_a_store_whose_making_was_interrupted_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow makes it in many migrations, none of which it repeats."""
    file = tmp_path / "mlflow.db"
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr("mlflow.store.db.utils._upgrade_db", mock.Mock(side_effect=KeyboardInterrupt))
        make_database(file)
    assert not file.exists()
    client = open_client(default_uri(tmp_path), None, None, tmp_path)
    assert client.create_experiment("e") and file.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"mlflow.db", LOCK}


def test_metrics_of_a_run_that_ended_meanwhile_are_sent_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    recorder.broken = True
    MetricsFile(tmp_path, "trainer").write(1, {"a": 1})
    with monkeypatch.context() as hurried:
        hurried.setattr(forwarder_module, "CLOSE_SECONDS", 0.1)
        tracking(Forwarder(tmp_path, recorder)).close(RunOutcome.FINISHED)
    assert "metrics.jsonl, and are sent when the run is started again" in caplog.text
    recorder.broken = False
    tracking(Forwarder(tmp_path, recorder)).close(RunOutcome.FINISHED)
    assert recorder.calls == [("log", "trainer", 1), ("close", RunOutcome.FINISHED)]


@pytest.mark.parametrize("times", [1, 10_000])
def test_the_end_of_a_run_is_sent_after_a_fault_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """One that lasts is raised."""

    class Faulty(Recorder):
        faults = (OSError,)
        left = times

        def close(self, outcome: RunOutcome) -> None:
            if self.left:
                self.left -= 1
                raise OSError("500")
            super().close(outcome)

    recorder = Faulty()
    monkeypatch.setattr(forwarder_module, "CLOSE_SECONDS", 60.0 if times == 1 else 2.0)
    thread = tracking(Forwarder(tmp_path, recorder))
    with nullcontext() if times == 1 else pytest.raises(OSError):
        thread.close(RunOutcome.FINISHED)
    assert recorder.calls == [("close", RunOutcome.FINISHED)] * (times == 1)


def test_a_run_ends_after_an_error_that_nobody_has_checked(tmp_path: Path) -> None:
    class Faulty(Recorder):
        def log(self, lines: object) -> None:
            self.log = super().log  # type: ignore[method-assign]
            raise ValueError("once")

    recorder = Faulty()
    MetricsFile(tmp_path, "trainer").write(1, {"a": 1})
    thread = tracking(Forwarder(tmp_path, recorder))
    with pytest.raises(ValueError):
        while True:
            thread.check()
    thread.close(RunOutcome.FINISHED)
    assert recorder.calls == [("log", "trainer", 1), ("close", RunOutcome.FINISHED)]


@pytest.mark.slow
def test_a_run_that_is_deleted_in_mlflow_has_not_failed(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = RunInfo("p", "n", root / "p" / "n")
    writer = open_writer("mlflow", info, root)
    thread = tracking(Forwarder(info.job_dir, writer))
    mlflow_client(root).delete_run(writer.run_id)  # type: ignore[attr-defined]
    MetricsFile(info.job_dir, "trainer").write(1, {"actor/loss": 0.5})
    with monkeypatch.context() as hurried:
        hurried.setattr(forwarder_module, "CLOSE_SECONDS", 2.0)
        thread.close(RunOutcome.FINISHED)
    assert "metrics.jsonl" in caplog.text
    again = open_writer("mlflow", info, root)
    tracking(Forwarder(info.job_dir, again)).close(RunOutcome.FINISHED)
    assert mlflow_client(root).get_run(again.run_id).data.metrics["actor/loss"] == 0.5  # type: ignore[attr-defined]


LOCKING = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_metrics_wait_for_a_locked_store(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds MLflow's database for longer than MLflow waits for it: 20 s, here 0.2 s."""
    text = sqlalchemy.sql.text
    monkeypatch.setattr(sqlalchemy.sql, "text", lambda sql: text(sql.replace("20000", "200")))
    info = RunInfo("p", "n", root / "p" / "n")
    thread = tracking(Forwarder(info.job_dir, open_writer("mlflow", info, root)), 0.1)
    command = [sys.executable, "-c", LOCKING, str(root / "mlflow.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        MetricsFile(info.job_dir, "trainer").write(1, {"a": 1})
        deadline = time.monotonic() + 120
        while "sent later" not in caplog.text:
            thread.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        other.kill()
    thread.close(RunOutcome.FINISHED)
    [run] = mlflow_client(root).search_runs([mlflow_client(root).get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["trainer/a"] == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_comes_back_gets_all_metrics(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a run in progress, and those of a run that starts again meanwhile: it continues, and is tracked as the
    same run. At a first start the address may be wrong.
    """
    monkeypatch.setattr(forwarder_module, "AGAIN_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # each takes seconds
    monkeypatch.setattr(forwarder_module, "CLOSE_SECONDS", 200.0)  # a busy machine takes a minute to import MLflow
    port = free_port()
    args = {"uri": f"http://127.0.0.1:{port}"}
    config = config_from_dict({
        "project": "p", "name": "again", "mode": "train", "checkpoint_root_dir": str(root),
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "data.jsonl"}}},
        "monitor": {"monitor_args": args},
    })  # fmt: skip
    stage = Stage(config, place(config, Machine(1, 0)), "sft")
    with pytest.raises(TransientFault):
        TrackingThread(stage).writer()
    going, again = (MetricsFile(root / "p" / name, "trainer") for name in ("going", "again"))
    with mlflow_server(root, port):
        info = RunInfo("p", "going", root / "p" / "going", args=args)
        in_progress = tracking(Forwarder(info.job_dir, open_writer("mlflow", info, root)), 0.1)
        first = TrackingThread(stage)
        again.write(1, {"a": 1})
        first.close(RunOutcome.FINISHED)
    going.write(1, {"a": 1})
    while "sent later" not in caplog.text:
        in_progress.check()
        time.sleep(0.05)
    caplog.clear()
    second = TrackingThread(stage)
    assert second.writer() is None and "sent later" in caplog.text
    again.write(2, {"a": 2})
    second.check()
    with mlflow_server(root, port):
        in_progress.close(RunOutcome.FINISHED)
        second.close(RunOutcome.FINISHED)
    client = mlflow_client(root)
    runs = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    histories = {run.info.run_name: client.get_metric_history(run.info.run_id, "trainer/a") for run in runs}
    steps = {name: [point.step for point in history] for name, history in histories.items()}
    assert len(runs) == 2 and steps == {"going": [1], "again": [1, 2]}


MLFLOW_SERVER = """
import os, sys
from mlflow.server import constants
os.environ |= {
    constants.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{sys.argv[1]}/mlflow.db",
    constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
    constants.ARTIFACTS_DESTINATION_ENV_VAR: f"{sys.argv[1]}/artifacts",
    constants.SERVE_ARTIFACTS_ENV_VAR: "true",
}
import uvicorn
from mlflow.server.fastapi_app import app
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
"""One process in place of the three of `mlflow server`; not this one, in which vLLM's engines would not start once
Flask was imported."""


@contextmanager
def mlflow_server(root: Path, port: int) -> Iterator[None]:
    """MLflow's server on the store in `root`, once it answers."""
    process = subprocess.Popen([sys.executable, "-c", MLFLOW_SERVER, str(root), str(port)])
    try:
        while True:
            assert process.poll() is None
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)
