"""Which GPUs a run takes; what is on them is given, for want of some."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.hosting import cluster
from trinity_core.hosting.gpus import (
    FREE_SECONDS,
    IDLE_BYTES,
    Gpu,
    free_gpus,
    only,
    refusal,
    survey,
    user_of,
    visible,
)

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


def test_a_visible_gpu_keeps_its_user() -> None:
    busy = [FOUR[0], Gpu("1", "GPU-11", "process 7 (python)")]
    assert [gpu.user for gpu in visible(busy, "GPU-1,0")] == ["process 7 (python)", ""]


def test_a_refusal_names_free_gpus_and_users_of_the_others() -> None:
    gpus = [FOUR[0], Gpu("1", "GPU-11", "process 7 (python)"), FOUR[2]]
    assert refusal(gpus, 2) == ""
    text = refusal(gpus, 3)
    assert (
        "wants 3 of this machine's GPUs, but of 3 only 2 are free (0, 2); GPU 1 is used by process 7 (python)." in text
    )
    assert "cluster.gpu_per_node to at most 2" in text and "\n" not in text


def test_processes_and_memory_make_a_gpu_used() -> None:
    assert user_of([], 0) == user_of([], IDLE_BYTES) == ""
    assert user_of([os.getpid()], 0).startswith(f"process {os.getpid()} (")
    assert user_of([2**22 + 1], 0) == f"process {2**22 + 1}", "of another container"
    assert user_of([], 2 * IDLE_BYTES) == "a process unknown (8.0 GiB are taken)"


@given(st.integers(1, 4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_a_run_takes_free_gpus(wanted: int, busy: list[bool]) -> None:
    gpus = [Gpu(gpu.name, gpu.uuid, "process 7" * used) for gpu, used in zip(FOUR, busy, strict=True)]
    free = [gpu.name for gpu in gpus if not gpu.user]
    if len(free) < wanted:
        with pytest.raises(TransientFault):
            free_gpus(wanted, lambda: gpus, wait=0)
    else:
        assert free_gpus(wanted, lambda: gpus, wait=0) == free[:wanted]


def test_a_run_without_gpus_does_not_look_for_any() -> None:
    """One that is broken would end it."""
    assert free_gpus(0, lambda: pytest.fail("looked")) == []


def test_gpus_that_do_not_exist_are_refused_at_once() -> None:
    with pytest.raises(TrinityError, match="wants 5 of this machine's GPUs, but of 4 only 4 are free"):
        free_gpus(5, lambda: FOUR)


def test_gpus_of_a_dying_attempt_are_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(cluster, "_had_room", set())
    monkeypatch.setattr(cluster, "wait_until_free", lambda wanted, wait: waits.append(wait) or 1)
    cluster.machine(1)
    monkeypatch.setattr(cluster, "_had_room", {None})
    cluster.machine(1)
    assert waits == [FREE_SECONDS, cluster.AGAIN_SECONDS] and waits[0] < waits[1]


def test_only_the_chosen_gpus_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    with only(["1"]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1" and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with only([]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1" and "CUDA_DEVICE_ORDER" not in os.environ


def test_the_machine_s_gpus_can_be_asked_for() -> None:
    """None without an NVIDIA driver; with one, each has a UUID."""
    assert all(gpu.uuid.startswith(("GPU-", "MIG-")) for gpu in survey())
