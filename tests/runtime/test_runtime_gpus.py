"""Which GPUs a run takes. The locks are real; what is on the GPUs is given, for want of some."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.runtime import cluster
from trinity_core.runtime.gpus import (
    FREE_SECONDS,
    IDLE_BYTES,
    SCREEN_BYTES,
    Gpu,
    GpuLocks,
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
    assert user_of([], 0) == user_of([], IDLE_BYTES) == ("", 0)
    assert user_of([os.getpid()], 0)[0].startswith(f"process {os.getpid()} (")
    assert user_of([2**22 + 1], 0) == (f"process {2**22 + 1}", 0), "of another container"
    assert user_of([], 3 * IDLE_BYTES) == ("a process unknown (3.0 GiB are taken)", 0)


def test_a_gpu_that_draws_a_screen_is_free_but_for_what_that_holds() -> None:
    desktop = {7: IDLE_BYTES, 8: IDLE_BYTES}
    assert user_of([], 3 * IDLE_BYTES, desktop) == ("", 3 * IDLE_BYTES)
    assert user_of([8], 2 * IDLE_BYTES, desktop) == ("", 2 * IDLE_BYTES), "a browser computes, too"
    assert user_of([], SCREEN_BYTES, {7: 0}) == ("", SCREEN_BYTES), "a driver that does not say how much"
    assert user_of([8, 2**22 + 1], 9 * IDLE_BYTES, desktop) == (f"process {2**22 + 1}", 2 * IDLE_BYTES)


def test_what_renders_and_computes_uses_a_gpu() -> None:
    """As simulators do, and what is left of a run that ended on a server whose GPUs each have an idle Xorg."""
    renders = 2**22 + 1
    for processes in ([renders], []):
        assert user_of(processes, 38 * IDLE_BYTES, {renders: 38 * IDLE_BYTES, 7: 2**22})[0] == f"process {renders}"
    for screen in ({7: 2**22}, {7: 0}):
        assert user_of([], 60 * IDLE_BYTES, screen)[0].startswith("a process unknown (")


def test_a_gpu_without_a_screen_is_taken_first(tmp_path: Path) -> None:
    locks = GpuLocks(tmp_path)
    for wanted, names in ((1, ["1"]), (2, ["1", "0"])):
        locks.take(wanted, lambda: [Gpu("0", "GPU-00", drawn=2**31), Gpu("1", "GPU-11")], wait=0)
        assert locks.names == names
        locks.release()


@given(st.lists(st.integers(1, 4), max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_runs_beside_each_other_never_share_a_gpu(tmp_path_factory, wishes: list[int], busy: list[bool]) -> None:
    """Each takes as many as it wants of those that are free, or none."""
    folder = tmp_path_factory.mktemp("locks")
    gpus = [Gpu(gpu.name, gpu.uuid, "process 7" * used) for gpu, used in zip(FOUR, busy, strict=True)]
    free = [gpu.name for gpu in gpus if not gpu.user]
    runs = []
    for wanted in wishes:
        run = GpuLocks(folder)
        try:
            run.take(wanted, lambda: gpus, wait=0)
            assert run.names == free[:wanted]
        except TransientFault:
            assert len(free) < wanted and not run.names
        free = free[len(run.names) :]
        runs.append(run)
    for run in runs:
        run.release()


def test_a_run_without_gpus_does_not_look_for_any(tmp_path: Path) -> None:
    """One that is broken would end it."""
    GpuLocks(tmp_path).take(0, lambda: pytest.fail("looked"))


def test_a_gpu_is_free_again_when_its_run_was_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from trinity_core.runtime.gpus import Gpu, GpuLocks\n"
        f"locks = GpuLocks(Path({str(tmp_path)!r})); locks.take(1, lambda: [Gpu('0', 'GPU-00')])\n"
        "print(locks.names, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"['0']\n"
        mine = GpuLocks(tmp_path)
        with pytest.raises(TransientFault, match=rf"GPU 0 is used by another run \(process {other.pid}\)"):
            mine.take(1, lambda: FOUR[:1], wait=0)
        mine.take(1, lambda: FOUR[:2], wait=0)
        assert mine.names == ["1"]
        mine.release()
        other.kill()
        mine.take(1, lambda: FOUR[:1])
        assert mine.names == ["0"]
        mine.release()


def test_the_lock_of_a_user_with_a_strict_umask_is_readable_to_others(tmp_path: Path) -> None:
    mine, before = GpuLocks(tmp_path), os.umask(0o077)
    try:
        mine.take(1, lambda: FOUR[:1])
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o644]
    mine.release()


def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    lock = tmp_path / ".trinity_gpu_GPU-00.lock"
    lock.touch(mode=0)
    mine, user = GpuLocks(tmp_path), os.geteuid()
    os.seteuid(user or 65534)  # root may read all
    try:
        with pytest.raises(TransientFault, match=re.escape(str(lock))):
            mine.take(1, lambda: FOUR[:1], wait=0)
    finally:
        os.seteuid(user)


def test_gpus_that_do_not_exist_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TrinityError, match="wants 5 of this machine's GPUs, but of 4 only 4 are free"):
        GpuLocks(tmp_path).take(5, lambda: FOUR)


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
