"""The ranks that write a checkpoint at once."""

from __future__ import annotations

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
