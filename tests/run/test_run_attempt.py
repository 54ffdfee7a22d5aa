"""An attempt's tracking: what it says, and when, with a real MLflow store and without Ray."""

from __future__ import annotations

import fcntl
import logging
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preflight_configs import config_of

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.runlock import hold
from trinity_core.config import Config, config_from_dict
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.exchange.tracking.metrics_file import MetricsFile
from trinity_core.exchange.tracking.run_record import read_record
from trinity_core.exchange.tracking.writers import RunOutcome, Writer
from trinity_core.hosting.actors import Actors, Trainers
from trinity_core.hosting.cluster import Cluster
from trinity_core.hosting.faults import ANOTHER_FOLLOWS, CANCEL_TOKEN, CancelToken, Stopped, withdraw
from trinity_core.hosting.placement import Machine, place
from trinity_core.run import attempt as run_attempt
from trinity_core.run.attempt import PLAIN, RunAttempt, open_attempt
from trinity_core.run.stage import Stage, resume


class WithoutRay(Cluster):
    """In place of a cluster that is alive."""

    def check(self) -> None: ...


def begin(root: Path, **monitor: Any) -> RunAttempt:
    config = config_from_dict({
        "project": "p",
        "name": "n",
        "mode": "train",
        "checkpoint_root_dir": str(root),
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"trainer_input": {"experience_buffer": {"path": "data.jsonl"}}},
        "monitor": monitor,
    })  # fmt: skip
    cluster = WithoutRay(config, Machine(1, 0))
    cluster._users = 1
    return RunAttempt(Stage(config, place(config, Machine(1, 0)), "sft"), cluster).start()


def test_a_session_that_cannot_start_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a user of the cluster, nor a thread that forwards metrics, nor a lock of the run; it is recorded."""
    attempts: list[RunAttempt] = []

    def fail(attempt: RunAttempt) -> None:
        attempts.append(attempt)
        attempt.tracking()
        hold(attempt.config.job_dir, "training")
        raise TrinityError("the engine does not fit")

    monkeypatch.setattr(RunAttempt, "engines", fail)
    before = set(threading.enumerate())
    with pytest.raises(TrinityError):
        begin(tmp_path, monitor_type="tensorboard")
    [attempt] = attempts
    assert attempt.cluster._users == 0
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name in ("forwarder", "tracking")]
    with (attempt.config.job_dir / ".training.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    record = read_record(attempt.config.job_dir)
    assert record is not None and record.state == "failed"


@pytest.fixture
def root(tmp_path: Path, empty_mlflow: Path) -> Path:
    """A checkpoint root with an MLflow store."""
    shutil.copy(empty_mlflow, tmp_path)
    return tmp_path


def lose_the_store(attempt: RunAttempt) -> None:
    """Numbers wait for it, and it is no database any more."""
    attempt.tracking()
    MetricsFile(attempt.config.job_dir, "trainer").write(1, {"loss": 1.0})
    (Path(attempt.config.checkpoint_root_dir) / "mlflow.db").write_bytes(b"no database" * 1000)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """An explorer that is a run of its own."""
    return config_from_dict({
        "project": "p",
        "name": "n",
        "mode": "explore",
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": "m", "max_response_tokens": 8, "max_model_len": 16},
        "buffer": {"explorer_input": {"taskset": {"path": "tasks.jsonl"}}},
        "synchronizer": {"sync_method": "checkpoint"},
        "monitor": {"monitor_type": "tensorboard"},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("error", "another_follows", "waited_for"),
    [
        (TransientFault("a node died"), True, True),
        (TransientFault("a node died for the third time"), False, False),
        (TrinityError("no room"), True, False),
        (KeyboardInterrupt(), True, False),
    ],
)
def test_an_explorer_that_cannot_start_is_not_waited_for(
    config: Config, monkeypatch: pytest.MonkeyPatch, error: BaseException, another_follows: bool, waited_for: bool
) -> None:
    """Unless its flow tries again."""
    stage = resume(Stage(config, place(config, Machine(1, 0)), "rft"))

    def fail(attempt: RunAttempt) -> None:
        raise error

    monkeypatch.setattr(RunAttempt, "engines", fail)
    cluster = WithoutRay(config, Machine(1, 0))
    cluster._users = 1
    monkeypatch.setattr("trinity_core.run.attempt.open_cluster", lambda *_: cluster)
    open_run_store(config).expect("explorer")
    token = ANOTHER_FOLLOWS.set(lambda: another_follows)
    with pytest.raises(type(error)):
        open_attempt(stage)
    ANOTHER_FOLLOWS.reset(token)
    assert is_awaited(config) == waited_for


@pytest.mark.parametrize("parts", [{"explore"}, {"explore", "train"}])
def test_a_trainer_that_cannot_start_is_not_waited_for(config: Config, parts: set[str]) -> None:
    """Its run had finished. An explorer that is a run of its own takes nothing back for the trainer's."""
    with open_run_store(config) as store:
        store.position("explorer")
        store.begin("trainer", 1)
        store.commit(1)
        store.expect_trainer()
        withdraw(config, TrinityError("no room"), parts)
        assert store.trainer().finished == ("train" in parts)
        assert not is_awaited(config)


def is_awaited(config: Config) -> bool:
    with open_run_store(config) as store:
        return not store.stats().explorers["explorer"].left


@pytest.mark.slow
def test_a_failed_run_keeps_its_error_if_tracking_fails_too(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_core.exchange.tracking.forwarder.FAILED_CLOSE_SECONDS", 2.0)
    attempt = begin(root)
    with pytest.raises(TransientFault), attempt:
        lose_the_store(attempt)
        raise TransientFault("the node died")
    assert "not a database" in caplog.text


@pytest.mark.slow
def test_a_run_whose_metrics_were_not_tracked_fails(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_core.exchange.tracking.forwarder.CLOSE_SECONDS", 2.0)
    attempt = begin(root)
    with pytest.raises(Exception, match="not a database"), attempt:
        lose_the_store(attempt)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(TransientFault("the node died"), RunOutcome.FAILED), (KeyboardInterrupt(), RunOutcome.CANCELLED)],
)
def test_tracking_that_opens_after_the_end_is_closed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    outcome: RunOutcome,
) -> None:
    """An attempt that fails early does not wait for it, and the next attempt opens it anew. No metrics are missed."""
    go_on, closed = threading.Event(), list[RunOutcome]()

    class Late(Writer):
        def close(self, outcome: RunOutcome) -> None:
            closed.append(outcome)

    def late(*_: Any) -> Any:
        assert go_on.wait(60)
        return Late()

    monkeypatch.setattr("trinity_core.run.tracking_thread.open_writer", late)
    monkeypatch.setattr("trinity_core.exchange.tracking.forwarder.FAILED_CLOSE_SECONDS", 0.1)
    with pytest.raises(type(error)), begin(tmp_path) as attempt:
        raise error
    assert attempt._tracking is not None
    assert "metrics" not in caplog.text
    go_on.set()
    attempt._tracking._thread.join(60)
    assert closed == [outcome] and "tracking" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt(), "cancelled"), (TrinityError("the explorer fails"), "failed")]
)
def test_a_part_that_was_asked_to_end_is_recorded_as_its_run_ended(
    tmp_path: Path, error: BaseException, state: str
) -> None:
    """The part itself, whose thread no signal reaches, sees the same in both cases."""
    begun = threading.Event()

    class Asked(CancelToken):
        def check(self) -> None:
            if begun.is_set():
                raise error

    def part() -> None:
        with begin(tmp_path, monitor_type="tensorboard") as attempt:
            begun.set()
            until_stopped(attempt)
            attempt.raise_if_cancelled()

    token = Asked()
    before = CANCEL_TOKEN.set(token)
    try:
        with pytest.raises(type(error)):
            PLAIN.run_components(token, {"trainer": part})
    finally:
        CANCEL_TOKEN.reset(before)
    record = read_record(tmp_path / "p/n")
    assert record is not None and record.state == state


def until_stopped(attempt: RunAttempt) -> None:
    """A component that works until the attempt stops."""
    while not attempt.is_stopping():
        time.sleep(0.01)


@pytest.mark.slow
def test_a_store_that_cannot_be_opened_ends_the_run_at_once(tmp_path: Path) -> None:
    attempt = begin(tmp_path, monitor_args={"uri": "nonsense://nowhere"})
    with pytest.raises(TrinityError), attempt:
        PLAIN.run_components(attempt, {"train": lambda: until_stopped(attempt)})


@pytest.mark.slow
def test_a_run_survives_a_tracking_store_that_is_away(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = begin(root)
    store = Path(attempt.config.checkpoint_root_dir) / "mlflow.db"
    with attempt:
        attempt.tracking()
        whole = store.read_bytes()
        lose_the_store(attempt)
        while "sent later" not in caplog.text:
            attempt.check()
            time.sleep(0.1)
        attempt.check()
        store.write_bytes(whole)


@pytest.mark.parametrize(("gpus", "first"), [(1, ["engine"]), (2, [])])
def test_engines_that_share_the_trainers_gpu_start_before_it(
    gpus: int, first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures the free memory while it starts. Workers that are started again do not wait for it again."""
    order: list[str] = []

    class Recording(WithoutRay):
        def take(self, kind: str, key: object) -> None:
            order.append(kind)
            raise TrinityError("far enough")

    engine = SimpleNamespace(start=SimpleNamespace(remote=lambda: "engine"))
    monkeypatch.setattr(RunAttempt, "engines", lambda attempt: [engine])
    monkeypatch.setattr(run_attempt, "result_of", lambda ref, *_: order.append(ref))
    config = config_of(f"cluster.gpu_per_node={gpus}", f"checkpoint_root_dir={tmp_path}")
    stage = Stage(config, place(config, Machine(2, gpus)), "rft")
    trainers = RunAttempt(stage, Recording(config, Machine(2, gpus))).trainers
    for _ in range(2):
        with pytest.raises(TrinityError):
            trainers.train(lambda trainer: None, SimpleNamespace())
    assert order == [*first, "trainers", "trainers"]


def test_a_trainer_that_got_notice_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has saved; that the trainer is started again is up to whoever starts the run again. A run that is asked to
    stop says so."""
    is_stopping = False
    actors = Actors(WithoutRay(Config(), Machine(1, 0)), Config(), None)  # type: ignore[arg-type]
    trainers = Trainers(actors, lambda: None, lambda: is_stopping)
    monkeypatch.setattr(Actors, "start_trainers", lambda _: [])
    for name, answer in (("connect_trainers", {"total_steps": 9}), ("run_until_done", [{"step": 3, "stopped": True}])):
        monkeypatch.setattr(f"trinity_core.hosting.actors.{name}", lambda *_, answer=answer: answer)
    monkeypatch.setattr("trinity_core.hosting.actors.starting", lambda *_: None)
    with pytest.raises(Stopped):
        trainers.train(lambda trainer: None, SimpleNamespace())
    is_stopping = True
    with caplog.at_level(logging.INFO, "trinity_core"):
        assert trainers.train(lambda trainer: None, SimpleNamespace())["step"] == 3
    assert "after step 3, which is saved" in caplog.text
