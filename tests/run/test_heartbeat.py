"""Waiting for processes: silent ones are given up, late ones are named, a starting explorer is announced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.waits import poll
from trinity_core.config import Config
from trinity_core.exchange.store.run_store import open_run_store
from trinity_core.hosting import actors, faults
from trinity_core.hosting.actors import Trainers
from trinity_core.hosting.faults import (
    CANCEL_TOKEN,
    CancelToken,
    ProcessLost,
    Stopped,
    explorer_starts,
    is_cancelled,
    result_of,
    within,
)


def silent(*verbs: str) -> Any:
    """An actor that is asked and does not answer."""
    return SimpleNamespace(**{verb: SimpleNamespace(remote=lambda *_, verb=verb: verb) for verb in verbs})


@pytest.fixture(autouse=True)
def nothing_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(faults, "POLL_SECONDS", 0.01)


def no_check() -> None:
    pass


def test_a_wait_with_a_limit_says_what_is_lacking() -> None:
    with pytest.raises(ProcessLost):
        result_of("ref", within(0.05, "the moon has not set", no_check))

    def lost() -> None:
        raise TransientFault("Ray has died")

    with pytest.raises(TransientFault):
        result_of("ref", within(60, "the moon has not set", lost))


def test_kept_processes_that_do_not_answer_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "LOAD_SECONDS", 0.05)
    monkeypatch.setattr(actors, "SILENCE_SECONDS", 0.05)
    with pytest.raises(ProcessLost):
        actors.take_over([silent("move_log")], Config(), "some/model", no_check)
    with pytest.raises(ProcessLost):
        actors.renew([silent("renew")], Config(), 1, no_check)


def test_a_rank_that_fails_alone_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it in a collective operation."""
    monkeypatch.setattr("ray.wait", lambda refs, **_: ([r for r in refs if r != "0"], [r for r in refs if r == "0"]))

    def get(ref: str, timeout: float | None = None) -> Any:
        if ref == "1":
            raise TrinityError("rank 1 has no room for the model")
        return "address", 1

    def worker(rank: str) -> Any:
        return SimpleNamespace(
            rendezvous=SimpleNamespace(remote=lambda: "meet"), start=SimpleNamespace(remote=lambda *_: rank)
        )

    monkeypatch.setattr("ray.get", get)
    with pytest.raises(TrinityError):
        actors.connect_trainers([worker("0"), worker("1")], within(5, "rank 0 waits for ever", no_check), lambda: False)


def test_a_run_that_is_cancelled_does_not_wait_for_nodes() -> None:
    token = CancelToken()
    token.stop()
    before = CANCEL_TOKEN.set(token)
    try:
        with pytest.raises(Stopped):
            result_of("ready", no_check, is_cancelled)
    finally:
        CANCEL_TOKEN.reset(before)


def test_a_conversion_ends_if_its_worker_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SILENCE_SECONDS", 0.05)
    cluster: Any = None
    trainers = Trainers(actors.Actors(cluster, Config(), cluster), no_check, lambda: False)
    trainers.workers = [silent("convert", "progress")]
    with pytest.raises(ProcessLost):
        trainers.convert(3)


def test_an_explorer_is_seen_while_its_engines_load(tmp_path: Path) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    with open_run_store(config) as store:
        store.expect("explorer")
        assert store.stats().explorers["explorer"].seen is None
        with explorer_starts(config):
            for _ in poll(30):
                if store.stats().explorers["explorer"].seen is not None:
                    return
    pytest.fail("the explorer is not announced")
