"""Which GPUs a run sees; what is on them is given, for want of some."""

from __future__ import annotations

import pytest

from trinity_core.hosting import gpus as room
from trinity_core.hosting.gpus import Gpu, visible, wait_for_release

FOUR = [Gpu(str(index), f"GPU-{index}{index}") for index in range(4)]


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,0", ["2", "0"]),
        (" 3 , 1", ["3", "1"]),
        ("0,7,1", ["0"]),
        ("GPU-22,0", ["GPU-22", "0"]),
        ("GPU-3", ["GPU-3"]),
        ("MIG-4f,MIG-5a", ["MIG-4f", "MIG-5a"]),
    ],
)
def test_visible_devices_are_read_as_cuda_does(allowed: str | None, names: list[str]) -> None:
    gpus = visible(FOUR, allowed)
    assert [gpu.name for gpu in gpus] == names
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)


@pytest.mark.parametrize(("count", "looks"), [(0, 0), (1, 1), (2, 3)])
def test_dying_processes_are_waited_for(count: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs beyond the run's are of no concern, and one that is broken would end a run without any."""
    states = [[Gpu("0", "GPU-0"), Gpu("1", "GPU-1", processes=pids)] for pids in ((7,), (7,), ())]
    left = iter(states)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(room, "survey", lambda: next(left))
    wait_for_release(count)
    assert len(list(left)) == 3 - looks
