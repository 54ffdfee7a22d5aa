"""Which ranks write a checkpoint at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_core.training import checkpoint
from trinity_core.training.distributed import Ranks

FOUR = Ranks(1, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("strategy", "turns"),
    [("unrestricted", [0, 0, 0, 0]), ("single_thread", [0, 1, 2, 3]), ("single_process", [0, 1, 2, 3]),
     ("single_node", [1, 0, 1, 0])],
)  # fmt: skip
def test_turns(strategy: str, turns: list[int], monkeypatch: Any) -> None:
    """Two nodes of two ranks each; this rank's node is the lower of the two."""

    def others(values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        values[3] = values[1]
        values[0] = values[2] = values[1] + 1
        return values

    monkeypatch.setattr(checkpoint, "sum_over_ranks", others)
    assert checkpoint.writing_turns(strategy, FOUR) == turns


def test_a_rank_writes_in_its_turn(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[bool] = []
    path = tmp_path / "share.pt"
    monkeypatch.setattr(checkpoint, "barrier", lambda ranks: seen.append(path.exists()))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(8):
            yield str(index), torch.tensor([index])

    checkpoint._save_share(tensors(), path, FOUR, [0, 1, 2, 3])
    assert seen == [False, True, True, True]
    assert sorted(torch.load(path, weights_only=True)) == ["1", "5"]
