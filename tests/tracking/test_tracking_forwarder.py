"""The way from a job's files to MLflow, TensorBoard and W&B, on the real libraries."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exception
from typing import Any
from unittest import mock

import pytest
from mlflow_store import mlflow_client
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.base.files import private_folder, write_json
from trinity_core.base.waits import poll
from trinity_core.exchange.checkpoints.commit import write_manifest
from trinity_core.exchange.tracking.curve import LearningCurve
from trinity_core.exchange.tracking.forwarder import (
    MOST_TRACES,
    Forwarder,
    complete_checkpoints,
    open_writer,
)
from trinity_core.exchange.tracking.metrics_file import MetricLine, MetricsFile, rewind
from trinity_core.exchange.tracking.mlflow_root import artifact_folder, default_uri, follow_moved_root
from trinity_core.exchange.tracking.mlflow_writer import (
    close_parent,
    describe_runs,
    keep_parent_open,
    open_client,
    run_note,
)
from trinity_core.exchange.tracking.rollouts import SampledRollout, rollout_files, save_rollouts, traces_dir
from trinity_core.exchange.tracking.scores import latest_scores
from trinity_core.exchange.tracking.writers import MONITORS, RunInfo, RunOutcome, Writer


class Recorder(Writer):
    """A writer that remembers."""

    link = "nowhere"
    faults = (ConnectionError,)

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.broken = False

    def log(self, lines) -> None:
        if self.broken:
            raise ConnectionError("the server is away")
        self.calls += [("log", line.source, line.step) for line in lines]

    def artifact(self, path: Path, folder: str = "") -> None:
        if self.broken:
            raise ConnectionError("the server is away")
        self.calls.append(("artifact", path.name))

    def checkpoint(self, step: int, path: Path) -> None:
        self.calls.append(("checkpoint", step))

    def score(self, step: int, value: float) -> bool:
        self.calls.append(("score", step, value))
        return True

    def close(self, outcome: RunOutcome) -> None:
        self.calls.append(("close", outcome))


def save_checkpoint(job_dir: Path, step: int) -> None:
    folder = job_dir / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    write_manifest(folder, step)
    (job_dir / "latest_checkpointed_iteration.txt").write_text(str(step))


def evaluate(job_dir: Path, step: int, accuracy: float) -> None:
    MetricsFile(job_dir, "eval").write(step, {"eval/gsm8k/accuracy/mean": accuracy, "eval/gsm8k/reward/mean": 9})


def test_forwards_each_thing_once(tmp_path: Path) -> None:
    recorder = Recorder()
    forwarder = Forwarder(tmp_path, recorder)
    MetricsFile(tmp_path, "trainer").write(1, {"loss": 1})
    evaluate(tmp_path, 1, 0.5)
    save_rollouts(tmp_path, "eval", 1, [SampledRollout("p", "r")])
    forwarder.poll()
    save_checkpoint(tmp_path, 1)
    (tmp_path / "global_step_2" / "actor").mkdir(parents=True)  # not whole
    forwarder.poll()
    forwarder.poll()
    assert recorder.calls == [
        ("log", "trainer", 1), ("log", "eval", 1), ("artifact", "eval_step_1.md"), ("checkpoint", 1), ("score", 1, 0.5),
    ]  # fmt: skip
    forwarder.close(RunOutcome.FINISHED)
    assert recorder.calls[-1] == ("close", RunOutcome.FINISHED)


@pytest.mark.parametrize("own_runs", [False, True])
def test_explorers_with_runs_of_their_own_are_kept_apart(tmp_path: Path, own_runs: bool) -> None:
    """In whichever order their flows poll. Where all of a job is one run, any flow may forward for the others."""

    class Apart(Recorder):
        per_explorer = True

    flows = [("both", "explorer"), ("explore", "explorer_new"), ("explore", "third")]
    writers = [Apart() if own_runs else Recorder() for _ in flows]
    forwarders = [Forwarder(tmp_path, w, *flow) for w, flow in zip(writers, flows, strict=True)]
    sources = ("explorer", "explorer_new", "explorer.third")
    for step in (1, 2):
        for source in sources:
            MetricsFile(tmp_path, source).write(step, {"a": 1})
            save_rollouts(tmp_path, source, step, [SampledRollout("p", "r")])
        for forwarder in forwarders if step == 1 else reversed(forwarders):
            forwarder.poll()
    if own_runs:
        for source, writer in zip(sources, writers, strict=True):
            sent = [("log", source, 1), ("artifact", f"{source}_step_1.md")]
            sent += [("log", source, 2), ("artifact", f"{source}_step_2.md")]
            assert writer.calls == sent
    else:
        assert [len(writer.calls) for writer in writers] == [6, 0, 6]


def test_evaluation_forwards_its_scores_exactly_once(tmp_path: Path) -> None:
    recorder = Recorder()
    training, evaluation = Forwarder(tmp_path, recorder, "both"), Forwarder(tmp_path, recorder, "bench")
    for source in ("trainer", "my_explorer", "eval"):
        MetricsFile(tmp_path, source).write(1, {"a": 1})
    evaluation.poll()
    assert recorder.calls == [("log", "eval", 1)]
    training.poll()
    MetricsFile(tmp_path, "eval").write(2, {"a": 1})
    training.poll()
    evaluation.poll()
    assert recorder.calls[1:] == [("log", "trainer", 1), ("log", "my_explorer", 1), ("log", "eval", 2)]


@pytest.mark.parametrize("again", [False, True])
def test_table_that_failed_to_send_is_sent_again(tmp_path: Path, again: bool) -> None:
    """By the same flow, or by the one that resumes it; once taken, by none."""
    recorder = Recorder()
    recorder.broken = True
    save_rollouts(tmp_path, "eval", 1, [SampledRollout("p", "r")])
    forwarder = Forwarder(tmp_path, recorder)
    with pytest.raises(ConnectionError):
        forwarder.poll()
    recorder.broken = False
    (Forwarder(tmp_path, recorder) if again else forwarder).poll()
    Forwarder(tmp_path, recorder).poll()
    assert recorder.calls == [("artifact", "eval_step_1.md")]
    save_rollouts(tmp_path, "eval", 1, [SampledRollout("p", "after a rewind", 1.0)])
    os.utime(rollout_files(tmp_path)[0][2], (time.time() + 9,) * 2)
    forwarder.poll()
    assert recorder.calls == [("artifact", "eval_step_1.md")] * 2


def test_scores_are_the_mean_over_eval_sets(tmp_path: Path) -> None:
    MetricsFile(tmp_path, "eval").write(3, {"eval/a/accuracy/mean": 0.2, "eval/b/accuracy/mean": 0.6, "eval/a/n": 7})
    MetricsFile(tmp_path, "eval").write(4, {"eval/a/accuracy": 0.5, "eval/chat/reward/mean": 0.9})
    MetricsFile(tmp_path, "trainer").write(4, {"accuracy": 1})
    assert latest_scores(tmp_path) == {3: 0.4, 4: 0.7}, "a set without accuracy counts by its reward"


def test_evaluation_has_no_score_while_an_eval_set_has_none(tmp_path: Path) -> None:
    """The verifier of `hard` was down at step 6; an earlier score of that step does not stand in for it."""
    MetricsFile(tmp_path, "eval").write(
        4, {"eval/easy/accuracy": 0.92, "eval/easy/judged": 9, "eval/hard/accuracy": 0.3, "eval/hard/judged": 9}
    )
    MetricsFile(tmp_path, "eval").write(
        6, {"eval/easy/accuracy": 0.9, "eval/easy/judged": 9, "eval/hard/accuracy": 0.9, "eval/hard/judged": 9}
    )
    MetricsFile(tmp_path, "eval").write(
        6, {"eval/easy/accuracy": 0.7, "eval/easy/judged": 9, "eval/hard/judged": 0, "eval/hard/reward": 0.1}
    )
    assert latest_scores(tmp_path) == {4: pytest.approx(0.61)}


def test_only_complete_checkpoints_are_forwarded(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path) == {}
    for step in (2, 10):
        save_checkpoint(tmp_path, step)
    (tmp_path / "global_step_6" / "actor" / "huggingface").mkdir(parents=True)  # weights for the explorer alone
    (tmp_path / "global_step_12").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7,")  # a wrong one hides no checkpoint
    assert list(complete_checkpoints(tmp_path)) == [2, 10]


@pytest.mark.parametrize(("name", "key"), [("mlfow", "mlfow"), ("own", "monitor.monitor_type")])
def test_a_monitor_that_is_unknown_or_of_another_base_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    monkeypatch.setitem(MONITORS, "own", lambda info, root: object())
    with raising(TrinityError, key=key):
        open_writer(name, RunInfo("p", "n", tmp_path), tmp_path)


def test_tensorboard_files(tmp_path: Path) -> None:
    info = RunInfo("p", "n", tmp_path / "p" / "n")
    writer = open_writer("tensorboard", info, tmp_path)
    forwarder = Forwarder(info.job_dir, writer)
    MetricsFile(info.job_dir, "trainer").write(3, {"loss": 0.25})
    (tmp_path / "notes.md").write_text("à la carte")
    writer.artifact(tmp_path / "notes.md", "texts")
    assert writer.score(4, 0.5)
    forwarder.close(RunOutcome.FINISHED)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(info.job_dir / "monitor" / "tensorboard")).Reload()
    [point] = events.Scalars("trainer/loss")
    assert (point.step, point.value) == (3, 0.25)
    assert [(point.step, point.value) for point in events.Scalars("eval/score")] == [(4, 0.5)]
    [text] = events.Tensors("texts/notes.md/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "à la carte"
    assert events.PluginTagToContent("text")


@pytest.mark.slow
def test_wandb_offline_keeps_its_run_and_no_key(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 2 + "01234567"
    args = {"mode": "offline", "api_key": key}
    info = RunInfo("p", "n", tmp_path / "p" / "n", {"monitor": {"monitor_args": args}}, args=args)
    for step in (1, 2):
        time.sleep(step - 1)  # W&B names a session's folder by the second
        forwarder = Forwarder(info.job_dir, open_writer("wandb", info, tmp_path))
        MetricsFile(info.job_dir, "trainer").write(step, {"loss": 1.0})
        assert forwarder.poll() == 1
        forwarder.close(RunOutcome.FINISHED)
    run_id = json.loads((info.job_dir / "monitor" / "wandb.json").read_text())["id"]
    runs = list((info.job_dir / "monitor" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(runs) == 2
    files = [path for path in (info.job_dir / "monitor").rglob("*") if path.is_file()]
    assert files and not any(key.encode() in path.read_bytes() for path in files)


@pytest.mark.slow
def test_wandb_runs_of_one_process_stay_apart(tmp_path: Path) -> None:
    """A trainer and an explorer beside each other: what one ends, the other continues."""
    args = {"mode": "offline"}
    trainer = RunInfo("p", "n", tmp_path / "p" / "n", args=args)
    writers = [open_writer("wandb", info, tmp_path) for info in (trainer, replace(trainer, explorer="explorer"))]
    writers[0].close(RunOutcome.FINISHED)
    writers[1].log([MetricLine(1, "explorer", 0.0, {"reward/mean": 1.0})])
    writers[1].close(RunOutcome.FINISHED)
    notes = [json.loads(path.read_text())["id"] for path in (trainer.job_dir / "monitor").glob("wandb*.json")]
    for run_id in notes:
        assert list((trainer.job_dir / "monitor" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(set(notes)) == 2


@pytest.mark.slow
def test_wandb_without_a_key_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    info = RunInfo("p", "n", tmp_path / "p" / "n", args={"base_url": "http://127.0.0.1:9"})
    with pytest.raises(TrinityError):
        open_writer("wandb", info, tmp_path)


@pytest.mark.slow
def test_flows_that_start_at_the_same_time_share_a_run(root: Path) -> None:
    info = RunInfo("p", "n", root / "p" / "n")
    with ThreadPoolExecutor(3) as threads:
        writers = list(threads.map(lambda _: open_writer("mlflow", info, root), range(3)))
    assert len({writer.run_id for writer in writers}) == 1  # type: ignore[attr-defined]
    client = mlflow_client(root)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    assert len(client.search_runs(experiments)) == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_the_load_of_the_machine_is_tracked(root: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    """Until the run ends; further where it is resumed; not at all if MLflow is set so."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", str(is_on).lower())
    info, client, name = RunInfo("p", "n", root / "p" / "n"), mlflow_client(root), "system/cpu_utilization_percentage"
    counts: list[list[int]] = [[]]
    for _ in range(2):
        writer = open_writer("mlflow", info, root)

        def steps(run: str = writer.run_id) -> list[int]:  # type: ignore[attr-defined]
            return [point.step for point in client.get_metric_history(run, name)]

        assert any(len(steps()) > len(counts[-1]) for _ in poll(60.0 if is_on else 0.6, 0.1)) == is_on
        writer.close(RunOutcome.FINISHED)
        counts.append(steps())
    _, first, both = counts
    assert bool(first) == is_on and both[: len(first)] == first and both == list(range(len(both)))
    assert len(both) > len(first) or not is_on


def test_mlflow_takes_metrics_with_any_name(root: Path) -> None:
    """MLflow refuses a whole batch for one name with an `@` in it, and so all metrics after it."""
    info = RunInfo("p", "n", root / "p" / "n")
    writer = open_writer("mlflow", info, root)
    writer.log([MetricLine(1, "eval", 0.0, {"eval/a/pass@4": 0.5, "eval/a/τ > 1": 0.25, "eval/a/accuracy": 0.75})])
    logged = mlflow_client(root).get_run(writer.run_id).data.metrics  # type: ignore[attr-defined]
    named = {"eval/a/pass_at_4": 0.5, "eval/a/τ _gt_ 1": 0.25, "eval/a/accuracy": 0.75}
    assert logged == named | {"Achieved/a accuracy": 0.75}
    odd = ["", "a//b", "/a", "a/", "c/../d", "./e", f"{'x' * 300}/accuracy", f"{'x' * 300}/b"]
    writer.log([MetricLine(1, "explorer", 0.0, dict.fromkeys(odd, 1.0))])
    added = mlflow_client(root).get_run(writer.run_id).data.metrics.keys() - logged.keys()  # type: ignore[attr-defined]
    assert len(added) == len(odd)


def test_mlflow_takes_settings_with_any_name(root: Path) -> None:
    """Arguments of rewards and workflows have the user's keys."""
    args = {"len<512": 0.5, "http://host": 1, "a!": 3, "x" * 300: 4}
    writer = open_writer("mlflow", RunInfo("p", "n", root / "p" / "n", {"args": args}), root)
    params = mlflow_client(root).get_run(writer.run_id).data.params  # type: ignore[attr-defined]
    assert sorted(params.values()) == ["0.5", "1", "3", "4"]
    assert params["args.len_lt_512"] == "0.5" and params["args.http:/_/host"] == "1"
    open_writer("mlflow", RunInfo("p", "n", root / "p" / "n", {"args": args | {"a!": 5}}), root)
    params = mlflow_client(root).get_run(writer.run_id).data.params  # type: ignore[attr-defined]
    assert {name: value for name, value in params.items() if name.startswith("start_2")} == {"start_2.args.a_": "5"}


def test_names_are_as_long_as_mlflow_takes_them(root: Path) -> None:
    """Of a run and its registered model PostgreSQL takes no more; of a data set no store does."""
    info = RunInfo("p" * 200, "n" * 255, root / "p" / "n", {"buffer": {"explorer_input": {"tasksets": [{
        "name": "t" * 600, "path": "hub/data"}]}}})  # fmt: skip
    writer = open_writer("mlflow", info, root)
    save_checkpoint(info.job_dir, 1)
    writer.checkpoint(1, info.job_dir / "global_step_1")
    rollout = SampledRollout("2 + 2?", "4", 1.0, {"part" * 100: 0.5}, "4", 7)
    assert writer.takes_traces
    writer.traces("explorer", 1, [rollout], 0)
    client = mlflow_client(root)
    run = client.get_run(writer.run_id)  # type: ignore[attr-defined]
    [model] = client.search_registered_models()
    [data] = run.inputs.dataset_inputs
    [trace] = client.search_traces(locations=[run.info.experiment_id])
    assessed = [assessment.name for assessment in trace.info.assessments]
    assert [len(run.info.run_name), len(model.name), len(data.dataset.name)] == [250, 256, 500]
    assert max(map(len, assessed)) == 250 and len(assessed) == 3


@pytest.mark.slow
def test_settings_of_a_later_start_are_added(root: Path) -> None:
    """MLflow never changes a parameter; without this it would show those of the first start for ever."""

    def start(lr: float, mode: str = "both", parent: Path | None = None) -> str:
        config = {"mode": mode, "algorithm": {"lr": lr}}
        info = RunInfo("p", "n", root / "p" / "n", config, parent_dir=parent, tags={"stage": mode})
        writer = open_writer("mlflow", info, root)
        writer.close(RunOutcome.FINISHED)
        return writer.run_id  # type: ignore[attr-defined]

    pipeline = root / "p" / "pipeline"
    runs = [start(0.1, parent=pipeline), start(0.1), start(0.2), start(0.2), start(0.3, "explore"), start(0.1)]
    assert len(set(runs)) == 1
    run = mlflow_client(root).get_run(runs[0])
    later = {"start_2.algorithm.lr": "0.2", "start_3.algorithm.lr": "0.1"}
    assert run.data.params == {"mode": "both", "algorithm.lr": "0.1"} | later
    assert run.data.tags["stage"] == "both"
    parent = mlflow_client(root).get_run(json.loads((pipeline / "monitor/mlflow.json").read_text())["run_id"])
    assert parent.data.params == {} and parent.data.tags["stage"] == "pipeline"


def test_two_flows_of_one_job_register_a_checkpoint_once(root: Path) -> None:
    """The explorer's flow scores what the trainer's registers, and a later flow finds both."""
    info = RunInfo("p", "n", root / "p" / "n")
    explorer, trainer, later = (
        Forwarder(info.job_dir, open_writer("mlflow", info, root), role) for role in ("explore", "train", "both")
    )
    evaluate(info.job_dir, 1, 0.5)
    save_checkpoint(info.job_dir, 1)
    for forwarder in (explorer, trainer, explorer, later):
        forwarder.poll()
    client = mlflow_client(root)
    [version] = client.search_model_versions("name = 'p.n'")
    assert version.tags == {"step": "1", "score": "0.5"}
    assert client.get_model_version_by_alias("p.n", "best").version == version.version
    assert len(client.get_metric_history(version.run_id, "eval/score")) == 1


@pytest.mark.slow
def test_evaluation_ends_only_its_own_run(root: Path) -> None:
    def status_after(outcome: RunOutcome, name: str, **more: Any) -> str:
        writer = open_writer("mlflow", RunInfo("p", name, root / "p" / name, **more), root)
        writer.close(outcome)
        return client.get_run(writer.run_id).info.status  # type: ignore[attr-defined]

    training = open_writer("mlflow", RunInfo("p", "n", root / "p" / "n"), root)
    client = mlflow_client(root)
    assert status_after(RunOutcome.FINISHED, "n", keeps_status=True) == "RUNNING", "the training continues"
    training.close(RunOutcome.FINISHED)
    assert status_after(RunOutcome.FAILED, "n", keeps_status=True) == "FINISHED", "the training was no failure"
    assert status_after(RunOutcome.FAILED, "base", keeps_status=True) == "FAILED"
    assert status_after(RunOutcome.FAILED, "n") == "FAILED"
    assert status_after(RunOutcome.CANCELLED, "n") == "KILLED"


@pytest.mark.slow
def test_the_trainer_decides_the_status_whoever_begins(root: Path) -> None:
    explorer = open_writer("mlflow", RunInfo("p", "n", root / "p" / "n", keeps_status=True, explorer="explorer"), root)
    trainer = open_writer("mlflow", RunInfo("p", "n", root / "p" / "n"), root)
    client = mlflow_client(root)
    explorer.close(RunOutcome.FAILED)
    assert client.get_run(trainer.run_id).info.status == "RUNNING"  # type: ignore[attr-defined]
    trainer.close(RunOutcome.FINISHED)
    assert client.get_run(trainer.run_id).info.status == "FINISHED"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_only_a_lone_stage_ends_the_pipelines_run(root: Path) -> None:
    def status_after(stage: str, outcome: RunOutcome) -> str:
        writer = open_writer("mlflow", RunInfo("p", stage, root / "p" / stage, parent_dir=whole), root)
        assert client.get_run(parent()).info.status == "RUNNING"
        writer.close(outcome)
        return client.get_run(parent()).info.status

    def parent() -> str:
        return json.loads((whole / "monitor" / "mlflow.json").read_text())["run_id"]

    whole, client = root / "p" / "n", mlflow_client(root)
    assert status_after("n_sft", RunOutcome.FINISHED) == "FINISHED"
    assert status_after("n_rft", RunOutcome.FAILED) == "FAILED"
    keep_parent_open(whole)
    assert status_after("n_rft", RunOutcome.FINISHED) == "RUNNING", "another stage follows"
    scoring = open_writer("mlflow", RunInfo("p", "n", whole, keeps_status=True), root)
    scoring.close(RunOutcome.FINISHED)
    assert client.get_run(parent()).info.status == "RUNNING", "the model before training was scored"
    (whole / "summary.json").write_text("{}")
    close_parent(whole, RunOutcome.FINISHED, {"before": 0.1, "rft": 0.5})
    ended = client.get_run(parent())
    assert "summary.json" in {file.path for file in client.list_artifacts(parent())}
    assert ended.info.status == "FINISHED" and ended.data.metrics["eval/score"] == 0.5
    assert status_after("n_rft", RunOutcome.FAILED) == "FAILED", "on its own again"


def test_a_pipelines_run_has_the_curves_of_its_stages(root: Path) -> None:
    """MLflow's page opens with it, and with its stages hidden."""
    whole, client = root / "p" / "n", mlflow_client(root)
    (root / "p" / "n_sft").mkdir(parents=True)
    (root / "p" / "n_sft" / "summary.json").write_text(json.dumps({"step": 110, "hf_dir": "/model"}))
    write_json(private_folder(whole) / "stages.json", {"sft": "n_sft", "rft": "n_rft"})
    keep_parent_open(whole)
    info = RunInfo("p", "n_rft", root / "p" / "n_rft", parent_dir=whole, tags={"stage": "rft"})
    writer = open_writer("mlflow", info, root)
    evaluate(info.job_dir, 0, 0.5)
    evaluate(info.job_dir, 60, 0.9)
    MetricsFile(info.job_dir, "explorer").write(60, {"reward/mean": 0.8})
    MetricsFile(info.job_dir, "trainer").write(60, {"reward/mean": 0.8, "actor/loss": 0.1})
    Forwarder(info.job_dir, writer).close(RunOutcome.FINISHED)
    (info.job_dir / "summary.json").write_text(json.dumps({"step": 60, "hf_dir": "/model"}))
    close_parent(whole, RunOutcome.FINISHED, {"before": None, "sft": 0.5, "rft": 0.9})
    run_id = run_note(whole)["run_id"]

    def curve(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]

    assert curve("eval/score") == [(110, 0.5), (170, 0.9)]
    assert curve("eval/gsm8k/accuracy/mean") == [(110, 0.5), (170, 0.9)]
    assert curve("Achieved/reward mean") == [(170, 0.8)], "once, though both have it"
    assert curve("actor/loss") == []


def test_a_runs_end_is_recorded_though_its_artifact_store_refuses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    info = RunInfo("p", "n", root / "p" / "n")
    writer = open_writer("mlflow", info, root)
    MetricsFile(info.job_dir, "trainer").write(1, {"actor/loss": 0.5})
    (info.job_dir / "summary.json").write_text("{}")
    monkeypatch.setattr(MlflowClient, "log_artifact", mock.Mock(side_effect=RuntimeError("no credentials")))
    with pytest.raises(RuntimeError):
        Forwarder(info.job_dir, writer).close(RunOutcome.FINISHED)
    ended = mlflow_client(root).get_run(run_note(info.job_dir)["run_id"])
    assert ended.info.status == "FINISHED" and ended.data.metrics["actor/loss"] == 0.5


@pytest.mark.parametrize("outcome", [RunOutcome.FINISHED, RunOutcome.FAILED])
def test_a_pipelines_run_ends_though_its_artifact_store_refuses(
    root: Path, monkeypatch: pytest.MonkeyPatch, outcome: RunOutcome
) -> None:
    """One that failed sends no summary: what lies there is an earlier attempt's."""
    from mlflow import MlflowClient

    sent: list[str] = []

    def refuse(self: MlflowClient, run_id: str, path: str, *_: object) -> None:
        sent.append(Path(path).name)
        raise RuntimeError("no credentials")

    whole, client = root / "p" / "n", mlflow_client(root)
    keep_parent_open(whole)
    open_writer("mlflow", RunInfo("p", "stage", root / "p/stage", parent_dir=whole), root).close(outcome)
    (whole / "summary.json").write_text("{}")
    monkeypatch.setattr(MlflowClient, "log_artifact", refuse)
    close_parent(whole, outcome)
    run_id = json.loads((whole / "monitor/mlflow.json").read_text())["run_id"]
    assert client.get_run(run_id).info.status == outcome.name
    assert sent == (["summary.json"] if outcome is RunOutcome.FINISHED else [])


@pytest.mark.slow
def test_store_password_is_kept_in_a_private_file_only(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/a://me:secret@host/mlflow.db"  # a path that reads like a login
    (tmp_path / "a:" / "me:secret@host").mkdir(parents=True)
    info = RunInfo("p", "n", tmp_path / "p" / "n", args={"uri": uri})
    for _ in range(2):
        link = open_writer("mlflow", info, tmp_path).link
        assert "trinity_core.exchange.tracking.mlflow_server" in link and "me:***@host/mlflow.db" in link
    assert run_note(info.job_dir)["uri"] == uri.replace("secret", "***")
    note = info.job_dir / "monitor" / "mlflow.json"
    assert json.loads(note.read_text())["uri"] == uri and note.stat().st_mode & 0o777 == 0o600
    elsewhere = replace(info, args={"uri": "nowhere://me:secret@host"})
    with pytest.raises(TrinityError) as caught:
        open_writer("mlflow", elsewhere, tmp_path)
    assert "secret" not in "".join(format_exception(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("left", ["", '{"run_id": "4', "null"])
def test_truncated_run_note_starts_a_new_run(root: Path, left: str) -> None:
    info = RunInfo("p", "n", root / "p" / "n")
    note = info.job_dir / "monitor" / "mlflow.json"
    note.parent.mkdir(parents=True)
    note.write_text(left)
    open_writer("mlflow", info, root).close(RunOutcome.FINISHED)
    begun = json.loads(note.read_text())["run_id"]
    open_writer("mlflow", info, root).close(RunOutcome.FINISHED)
    assert json.loads(note.read_text())["run_id"] == begun


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_moved_root_keeps_its_runs_and_their_artifacts(tmp_path: Path, how: str) -> None:
    """With everything in it: database, artifacts, runs. Nothing is written to the old place any more."""
    from mlflow.tracking._tracking_service import utils

    old, new = tmp_path / "old root", tmp_path / "elsewhere/new root"

    def track(root: Path, step: int) -> Any:
        utils._artifact_repos_cache.clear()  # of another process
        info = RunInfo("p", "n", root / "p" / "n", identity="a", parent_dir=root / "p" / "whole")
        writer: Any = open_writer("mlflow", info, root)
        writer.log([MetricLine(step, "trainer", 0.0, {"actor/loss": 1.0})])
        save_checkpoint(info.job_dir, step)
        writer.checkpoint(step, info.job_dir / f"global_step_{step}")
        (root / f"{step}.txt").write_text("x")
        writer.artifact(root / f"{step}.txt")
        writer.traces("explorer", step, [SampledRollout("2 + 2?", "4", 1.0, {}, "4", 7)], 0)
        writer.close(RunOutcome.FINISHED)
        return writer.run_id

    first = track(old, 1)
    new.parent.mkdir()
    if how == "moved":
        old.rename(new)
    else:
        shutil.copytree(old, new)
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    describe_runs(new)
    assert track(new, 2) == first
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before
    client = mlflow_client(new)
    [experiment] = [one for one in client.search_experiments() if one.name == "p"]
    run = client.get_run(first)
    assert sorted(file.path for file in client.list_artifacts(first)) == ["1.txt", "2.txt"]
    assert experiment.artifact_location == (new / "mlflow_artifacts").as_uri()
    assert run.data.tags["job_dir"] == str(new / "p/n") and len(client.search_runs([experiment.experiment_id])) == 2
    sources = {version.source for version in client.search_model_versions()}
    assert sources == {(new / f"p/n/global_step_{step}").as_uri() for step in (1, 2)}
    assert run_note(new / "p/n")["uri"] == run_note(new / "p/whole")["uri"] == f"sqlite:///{new}/mlflow.db"
    assert {point.step for point in client.get_metric_history(first, "actor/loss")} == {1, 2}


@contextmanager
def as_another_account() -> Iterator[None]:
    os.setresgid(65534, 65534, 0)
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_a_copy_of_a_root_that_is_closed_to_this_user_is_a_root_of_its_own() -> None:
    with TemporaryDirectory() as place:
        theirs, ours = Path(place, "theirs/checkpoints"), Path(place, "ours")
        theirs.mkdir(parents=True)
        client = open_client(default_uri(theirs), None, None, theirs)
        experiment = client.create_experiment("e", artifact_folder(theirs).as_uri())
        shutil.copytree(theirs, ours)
        for path in (Path(place), ours, *ours.rglob("*")):
            os.chown(path, 65534, 65534)
        theirs.parent.chmod(0o700)
        with as_another_account():
            follow_moved_root(ours)
        assert mlflow_client(ours).get_experiment(experiment).artifact_location == artifact_folder(ours).as_uri()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_runs_of_another_account_in_a_shared_root_are_left_to_it() -> None:
    """Their notes may hold a password, and are closed to the group too."""
    with TemporaryDirectory() as place:
        root = Path(place, "shared")
        open_writer("mlflow", RunInfo("p", "n", root / "p/n"), root).close(RunOutcome.FINISHED)
        for path in (Path(place), root, *root.rglob("*")):
            os.chown(path, 0, 65534)
            path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))
        (root / "p/n/monitor/mlflow.json").chmod(0o600)
        with as_another_account():
            describe_runs(root)


@pytest.mark.slow
def test_a_copy_of_a_run_is_tracked_from_its_first_line_in_a_run_of_its_own(root: Path) -> None:
    """So is a run that somebody has deleted in MLflow. In W&B: `test_evaluations_of_separate_explorers_…`."""

    def tracked(name: str, identity: str) -> tuple[str, int]:
        info = RunInfo("p", name, root / "p" / name, identity=identity)
        writer: Any = open_writer("mlflow", info, root)
        lines = Forwarder(info.job_dir, writer, target="mlflow").poll()
        writer.close(RunOutcome.FINISHED)
        return writer.run_id, lines

    for step in (1, 2):
        MetricsFile(root / "p/n", "trainer").write(step, {"loss": 1.0})
    first, lines = tracked("n", "")  # by an evaluation before the run was started
    assert lines == 2 and tracked("n", "a") == (first, 0)
    shutil.copytree(root / "p/n", root / "p/copy")
    copy, lines = tracked("copy", "b")
    assert (copy != first, lines) == (True, 2)
    assert tracked("copy", "b") == (copy, 0) and tracked("n", "a") == (first, 0)
    mlflow_client(root).delete_run(copy)
    assert tracked("copy", "b")[1] == 2


def test_a_copied_pipeline_has_a_parent_run_of_its_own(root: Path) -> None:
    def parent_of(pipeline: str) -> str:
        info = RunInfo("p", f"{pipeline}_rft", root / "p" / f"{pipeline}_rft", parent_dir=root / "p" / pipeline)
        writer: Any = open_writer("mlflow", info, root)
        writer.close(RunOutcome.FINISHED)
        return mlflow_client(root).get_run(writer.run_id).data.tags["mlflow.parentRunId"]

    first = parent_of("n")
    for folder in ("", "_rft"):
        shutil.copytree(root / f"p/n{folder}", root / f"p/copy{folder}")
    copied = parent_of("copy")
    assert copied != first and (parent_of("copy"), parent_of("n")) == (copied, first)
    (root / "p/n").rename(root / "p/moved")
    shutil.rmtree(root / "p/n_rft")
    assert parent_of("moved") == first


@pytest.mark.slow
def test_evaluations_of_separate_explorers_are_in_one_run_of_each_copy(tmp_path: Path) -> None:
    def forwarded(name: str, role: str, explorer: str = "") -> int:
        info = RunInfo("p", name, tmp_path / name, args={"mode": "offline"}, explorer=explorer, identity=name)
        writer = open_writer("wandb", info, tmp_path)
        lines = Forwarder(info.job_dir, writer, role, explorer or "explorer", target="wandb").poll()
        writer.close(RunOutcome.FINISHED)
        return lines

    for step in (1, 2):
        evaluate(tmp_path / "n", step, 0.5)
    assert forwarded("n", "explore", "first") == 2
    assert forwarded("n", "bench") == 0
    evaluate(tmp_path / "n", 3, 0.5)
    assert (forwarded("n", "bench"), forwarded("n", "explore", "second")) == (1, 0)
    shutil.copytree(tmp_path / "n", tmp_path / "copy")
    assert forwarded("copy", "explore", "first") == 3


@pytest.mark.slow
def test_mlflow_keeps_runs_models_and_the_best(tmp_path: Path) -> None:
    parent = tmp_path / "project" / "name"
    config = {"algorithm": {"lr": 0.1}, "monitor": {"monitor_args": {"api_key": "hidden"}}}
    info = RunInfo(
        "project", "name_rft", tmp_path / "project" / "name_rft", config, parent_dir=parent, tags={"stage": "rft"}
    )
    forwarder = Forwarder(info.job_dir, open_writer("mlflow", info, tmp_path))
    trainer = MetricsFile(info.job_dir, "trainer")
    for step, accuracy in ((1, 0.3), (2, 0.8), (3, 0.5)):
        trainer.write(step, {"actor/loss": 1.0 / step, "broken": float("nan")})
        evaluate(info.job_dir, step, accuracy)
        save_checkpoint(info.job_dir, step)
        forwarder.poll()
    save_rollouts(info.job_dir, "eval", 3, [SampledRollout("p", "r", 1.0)])
    assert LearningCurve(info.job_dir).draw() is not None
    forwarder.close(RunOutcome.FAILED)

    # The same job again: it resumes from checkpoint 2 in the same run.
    rewind(info.job_dir, 2)
    writer = open_writer("mlflow", info, tmp_path)
    forwarder = Forwarder(info.job_dir, writer)
    trainer.write(3, {"actor/loss": 0.3})
    forwarder.close(RunOutcome.FINISHED)

    client = mlflow_client(tmp_path)
    [experiment] = [one for one in client.search_experiments() if one.name == "project"]
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"name", "name_rft"}
    run = runs["name_rft"]
    assert run.data.tags["mlflow.parentRunId"] == runs["name"].info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["algorithm.lr"] == "0.1" and "hidden" not in str(run.data.params)
    history = client.get_metric_history(run.info.run_id, "actor/loss")
    assert [point.step for point in history] == [1, 2, 3, 3]
    groups = {name.partition("/")[0] for name in run.data.metrics if not name.startswith("system/")}
    assert sorted(groups)[0] == sorted(groups, key=str.lower)[0] == "Achieved", (
        "MLflow's charts begin with what is in it"
    )
    best = client.get_model_version_by_alias("project.name_rft", "best")
    assert best.tags["step"] == "2" and best.source.endswith("name_rft/global_step_2")
    assert len(client.search_model_versions("name = 'project.name_rft'")) == 3
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"rollouts", "curve.png"}
    assert (tmp_path / "mlflow_artifacts").is_dir()


def test_rollouts_become_traces_of_the_run_in_mlflow(root: Path) -> None:
    info = RunInfo("project", "name", root / "project" / "name")
    writer = open_writer("mlflow", info, root)
    turns = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "#### 4"},
    ]
    rollout = SampledRollout("2 + 2?", "#### 4", 1.0, {"format": 0.5}, "4", 7, turns=turns, span=(1000.0, 1002.5))
    for _ in range(2):  # the second time after a crash between sending and noting it
        save_rollouts(info.job_dir, "explorer", 3, [rollout], traces_dir(info.job_dir))
        forwarder = Forwarder(info.job_dir, writer)
        forwarder.poll()
        assert not list(traces_dir(info.job_dir).iterdir()) and not forwarder.dropped_traces
    writer.close(RunOutcome.FINISHED)

    client = mlflow_client(root)
    experiment = client.get_experiment_by_name("project")
    [trace] = client.search_traces(locations=[experiment.experiment_id])
    assert trace.info.trace_metadata["mlflow.sourceRun"] == writer.run_id
    assert (trace.info.request_time, trace.info.execution_duration) == (1_000_000, 2500)
    assert {(span.start_time_ns, span.end_time_ns) for span in trace.data.spans} == {
        (1000 * 10**9, 10**12 + 25 * 10**8)
    }
    spans = {span.name: span for span in trace.data.spans}
    assert [span.span_type for span in trace.data.spans] == ["AGENT", "CHAT_MODEL", "TOOL", "CHAT_MODEL"]
    assert spans["tool"].outputs == turns[2] and spans["tool"].inputs == turns[1]
    assert trace.data.spans[0].inputs == "2 + 2?" and trace.data.spans[0].outputs == "#### 4"
    assessments = sorted((assessment.name, assessment.value) for assessment in trace.info.assessments)
    assert assessments == [("format", 0.5), ("reward", 1.0), ("truth", "4")]


def test_traces_wait_for_a_tracking_system_that_is_away(tmp_path: Path) -> None:
    class TraceRecorder(Recorder):
        takes_traces = True

        def traces(self, source, step, rollouts, time_ns) -> None:
            if self.broken:
                raise ConnectionError("refused")
            self.calls.append(("traces", source, step))

    recorder = TraceRecorder()
    forwarder = Forwarder(tmp_path, recorder)
    for step in range(1, MOST_TRACES + 3):
        save_rollouts(tmp_path, "explorer", step, [SampledRollout("p", "r")], traces_dir(tmp_path))
    recorder.broken = True
    with pytest.raises(ConnectionError):
        forwarder.poll()
    recorder.broken = False
    forwarder.poll()
    assert recorder.calls == [("traces", "explorer", step) for step in range(3, MOST_TRACES + 3)]
    assert forwarder.dropped_traces == 2


@pytest.mark.slow
def test_model_versions_registered_by_the_user_are_ignored(root: Path) -> None:
    """Under a name of their own, or beside those of the checkpoints."""
    info = RunInfo("p", "n", root / "p" / "n")
    writer = open_writer("mlflow", info, root)
    save_checkpoint(info.job_dir, 1)
    Forwarder(info.job_dir, writer).poll()
    client, run_id = mlflow_client(root), writer.run_id  # type: ignore[attr-defined]
    client.create_registered_model("mine")
    for name, tags in (("mine", {}), ("mine", {"step": "2"}), ("p.n", {})):
        client.create_model_version(name, info.job_dir.as_uri(), run_id, tags=tags)
    evaluate(info.job_dir, 1, 0.5)
    evaluate(info.job_dir, 2, 0.7)
    save_checkpoint(info.job_dir, 2)
    Forwarder(info.job_dir, writer).poll()
    versions = {str(version.version): version.tags for version in client.search_model_versions("name = 'p.n'")}
    assert versions == {"1": {"step": "1", "score": "0.5"}, "2": {}, "3": {"step": "2", "score": "0.7"}}
    assert str(client.get_model_version_by_alias("p.n", "best").version) == "3"
    Forwarder(info.job_dir, writer, scores=lambda: {1: 0.5}).poll()  # those of step 2 were made with something else
    versions = {str(version.version): version.tags for version in client.search_model_versions("name = 'p.n'")}
    assert versions == {"1": {"step": "1", "score": "0.5"}, "2": {}, "3": {"step": "2", "score": "0.7"}}
    assert str(client.get_model_version_by_alias("p.n", "best").version) == "1"


def test_variables_of_a_job_around_the_run_do_not_divert_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_ACTIVE_MODEL_ID", "_MLFLOW_ACTIVE_MODEL_ID")
    for number, name in enumerate(ids):
        monkeypatch.setenv(name, f"{number}" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of another job")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    info = RunInfo("p", "n", root / "p" / "n")
    writer: Any = open_writer("mlflow", info, root)
    writer.log([MetricLine(1, "trainer", 0.0, {"actor/loss": 1.0})])
    save_checkpoint(info.job_dir, 1)
    writer.checkpoint(1, info.job_dir / "global_step_1")
    assert writer.score(1, 0.5)
    writer.close(RunOutcome.FINISHED)
    client = mlflow_client(root)
    run = client.get_run(writer.run_id)
    assert run.data.metrics["actor/loss"] == 1.0 and client.get_experiment(run.info.experiment_id).name == "p"
    assert {one.name for one in client.search_experiments()} == {"Default", "p"}
