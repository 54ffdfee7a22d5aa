"""Which trained rows leave the store when a checkpoint is whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trinity_core.training.sources import RETENTION, RolloutSource


class Store:
    def __init__(self) -> None:
        self.committed: list[int] = []
        self.pruned: list[int] = []

    def commit(self, step: int) -> None:
        self.committed.append(step)

    def prune(self, step: int) -> int:
        self.pruned.append(step)
        return 0


@pytest.mark.parametrize(("oldest", "expected"), [(10, 10), (RETENTION + 40, 50)])
def test_rows_go_that_no_checkpoint_needs_and_that_are_old(oldest: int, expected: int) -> None:
    source: Any = SimpleNamespace(store=Store(), reuses=False)
    RolloutSource.commit(source, RETENTION + 50, oldest)
    assert source.store.committed == [RETENTION + 50] and source.store.pruned == [expected]


def test_rows_that_may_be_used_again_stay() -> None:
    source: Any = SimpleNamespace(store=Store(), reuses=True)
    RolloutSource.commit(source, 500, 400)
    assert source.store.committed == [500] and not source.store.pruned
