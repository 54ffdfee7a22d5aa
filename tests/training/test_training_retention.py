"""Trained rows that leave the store once a checkpoint is complete."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity_core.config.training import RETENTION
from trinity_core.exchange.store.strategies import Strategy, make_strategy
from trinity_core.training.sources import RolloutSource


class Store:
    def __init__(self) -> None:
        self.committed: list[int] = []
        self.pruned: list[tuple[int, Strategy]] = []

    def commit(self, step: int) -> None:
        self.committed.append(step)

    def prune(self, step: int, strategy: Strategy) -> int:
        self.pruned.append((step, strategy))
        return 0

    def explorer_steps(self) -> dict[str, int]:
        return {"explorer": 7}


def source_of(tmp_path: Path, replay: dict[str, Any] | None = None) -> Any:
    strategy = make_strategy("default", replay=replay)
    return SimpleNamespace(store=Store(), strategy=strategy, explorer_meta=tmp_path / "explorer_meta.json")


@pytest.mark.parametrize("replay", [None, {}, {"reuse_cooldown_time": 60.0}])
@pytest.mark.parametrize(("oldest", "expected"), [(10, 10), (RETENTION + 40, 50)])
def test_old_rows_that_no_checkpoint_needs_are_pruned(
    tmp_path: Path, oldest: int, expected: int, replay: dict[str, Any] | None
) -> None:
    """The store keeps rows that the strategy may use again."""
    source = source_of(tmp_path, replay)
    RolloutSource.commit(source, RETENTION + 50, oldest)
    assert source.store.committed == [RETENTION + 50] and source.store.pruned == [(expected, source.strategy)]


def test_step_of_each_explorer_is_recorded(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    RolloutSource.commit(source, 5, 5)
    assert json.loads(source.explorer_meta.read_text()) == {"checkpoint": 5, "explorer_steps": {"explorer": 7}}
