"""What a trainer that waits for rollouts tells of whom it waits for, and what explorers hear of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trinity_core.training import sources
from trinity_core.training.sources import RolloutSource


@pytest.fixture
def source(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> RolloutSource:
    """The rollouts of a run of 4 train steps of 16 rows."""
    monkeypatch.setattr(sources, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("trinity_core.waits.FIRST_SECONDS", 0.0)
    return RolloutSource(make_config(), None)


def test_a_wait_says_who_is_missing(source: RolloutSource, caplog: pytest.LogCaptureFixture) -> None:
    source.store.join("explorer", 9)
    source.store.put("explorer", 1, {}, [], 0)
    told: list[str] = []
    with caplog.at_level(logging.INFO):
        assert source.draw(1, lambda: bool(told), told.append) is None
    assert told == [
        "waits for experiences for train step 1, 0 s so far; 0 of 16 rows are there; explorers known: explorer (step 1 "
        "of 9, no experience left of its last 1 steps, last seen 0 s ago)"
    ]
    assert told[0] in caplog.text


def test_explorers_know_that_a_trainer_is_at_work(source: RolloutSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SEEN_SECONDS", 0.01)
    with source.present(4):
        first = source.store.trainer()
        assert first.total == 4 and first.seen is not None
        while source.store.trainer().seen == first.seen:
            pass
    source.store.commit(4)
    assert source.store.trainer().finished
