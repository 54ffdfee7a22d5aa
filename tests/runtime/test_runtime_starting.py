"""What is said while the processes of a run start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trinity_core.config import Config, store_url
from trinity_core.errors import TransientFault
from trinity_core.runtime.starting import Arrival, StartWait
from trinity_core.store.store import ExperienceStore


def test_a_wait_for_processes_names_those_without_a_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trinity_core.waits.FIRST_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    StartWait("the engines of e", lambda: ["run/e/engine_0"], lambda: None).check()
    StartWait("the trainer's workers", lambda: [], lambda: None).check()
    assert caplog.messages == [
        "waits for the engines of e to start, 0 s so far; Ray has yet to start run/e/engine_0",
        "waits for the trainer's workers to start, 0 s so far; they are loading",
    ]


def test_an_explorer_is_seen_while_its_engines_load(tmp_path: Path) -> None:
    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    with ExperienceStore.open(store_url(config), str(config.job_dir)) as store:
        store.expect("explorer")
        assert store.stats().explorers["explorer"]["seen"] is None
        Arrival(config, lambda: None).check()
        assert store.stats().explorers["explorer"]["seen"] is not None


def test_a_lost_run_is_heard_of_while_it_starts(tmp_path: Path) -> None:
    def check() -> None:
        raise TransientFault("Ray has died")

    config = Config(project="tests", name="run", checkpoint_root_dir=str(tmp_path))
    starting = Arrival(config, StartWait("the engines of e", lambda: [], check).check)
    with pytest.raises(TransientFault, match="Ray has died"):
        starting.check()
