"""Checkpoints written in the background: by one rank, by several, with little memory, and with failures."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from batches import make_batch
from saving_helpers import save
from torch.overrides import TorchFunctionMode

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.exchange import pinned
from trinity_core.exchange.checkpoints.commit import Entry, entry_of, write_manifest
from trinity_core.exchange.checkpoints.shard_writer import Piece, Segment, ShardWriter
from trinity_core.exchange.pinned import CopyStream, pin
from trinity_core.training import saving
from trinity_core.training.checkpoint import copy, engines_by_folder
from trinity_core.training.distributed import Ranks, join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.saving import CheckpointWriter


@pytest.fixture
def writers() -> Iterator[list[CheckpointWriter]]:
    """The writers of two ranks."""
    both = [CheckpointWriter(Ranks(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    yield both
    for writer in both:
        writer.let_go()


def one_rank() -> CheckpointWriter:
    return CheckpointWriter(Ranks(0, 1, torch.device("cpu")))


def held() -> int:
    """Bytes of memory that checkpoints are copied to."""
    open_files = [
        path.stat() for path in Path("/proc/self/fd").iterdir() if "trinity-checkpoint" in os.path.realpath(path)
    ]
    return sum({status.st_ino: 512 * status.st_blocks for status in open_files}.values())


def named(**tensors: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(tensors.items())


@pytest.mark.parametrize("largest", [0, pytest.param(saving.PROCESS_BYTES, marks=pytest.mark.slow)])
def test_copied_files_are_written_in_background(tmp_path: Path, largest: int) -> None:
    writer, done, entries = one_rank(), Event(), {}

    def finish(written: dict[str, Entry]) -> None:
        entries.update(written)
        assert done.wait(60)

    weights, mixed = torch.arange(1000.0), torch.arange(10).to(torch.bfloat16)
    for step in (1, 2):
        folder = tmp_path / str(step)
        folder.mkdir()
        done.clear()
        with writer.start(step, folder, [0], largest, finish) as copying:
            copying.file("actor/model.pt", named(a=weights[100:300].view(2, 100), b=mixed, c=torch.empty(0, 3)))
            copying.file("versions.safetensors", named(a=weights), {"version": "7"})
            copying.small["state.json"] = b"{}"
        expected = weights[100:300].view(2, 100).clone()
        weights += 1  # the next step
        with pytest.raises(TransientFault):
            writer.until_written(0.05)
        done.set()
        writer.until_written()
        loaded = torch.load(folder / "actor/model.pt", weights_only=True, mmap=True)
        assert torch.equal(loaded["a"], expected) and torch.equal(loaded["b"], mixed) and loaded["c"].shape == (0, 3)
        assert {name: entry_of(folder / name) for name in entries} == entries and len(entries) == 3
    assert len(writer._segments) <= 2, "memory is used again"
    worker = writer._worker
    assert (worker is not None) is (largest > 0)
    assert worker is None or psutil.Process(worker.process.pid).nice() > psutil.Process().nice()
    writer.close()
    assert worker is None or not worker.alive


class Late(CopyStream):
    """A slow GPU stream: copies happen only when the next operation has to wait for them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies: list[Callable[[], object]] = []
        self.all_made = Event()

    def copy(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        self.copies.append(partial(target.copy_, tensor))

    def copied(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.all_made.wait(60))

    def hold_device(self) -> None:
        for make in self.copies:
            make()
        self.copies = []
        self.all_made.set()


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {"trainer__dtype": "bfloat16"},
        {"algorithm": "ppo"},
        {"model__lora_configs": "[{name: a, lora_rank: 4}]"},
        {
            "trainer__zero_stage": 2,
            "trainer__dtype": "bfloat16",
            "trainer__trainer_config__actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
        },
    ],
)
def test_what_changes_the_state_waits_for_the_copy_of_a_gpu(
    make_config: Any, tmp_path: Path, overrides: dict[str, Any], moves: bool
) -> None:
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    learner = Learner(make_config(**overrides), 4, ranks)
    learner.step(make_batch(1), 1)
    expected, folder = tmp_path / "expected", tmp_path / "beside"
    for saved in (expected, folder):
        saved.mkdir()
    save(learner, 1, expected)
    engines = list(engines_by_folder(learner).values())
    streams = [Late() for _ in engines]
    for engine, stream in zip(engines, streams, strict=True):
        engine.copies = stream
    writer = CheckpointWriter(ranks)
    with writer.start(1, folder, [0], 0, lambda written: None) as copying:
        copy(learner, 1, copying)
    assert [bool(stream.copies) for stream in streams] == [engine.plain for engine in engines]
    if moves:
        learner.offload()
    else:
        learner.step(make_batch(2), 2)
    assert not any(stream.copies for stream in streams)
    writer.close()
    names = {path.relative_to(expected) for path in expected.rglob("*.pt")}
    assert names == {path.relative_to(folder) for path in folder.rglob("*.pt")}
    for name in names:
        before, copied = (torch.load(root / name, weights_only=True) for root in (expected, folder))
        for key in before if "extra_state" not in str(name) else ():
            assert torch.equal(before[key], copied[key]), (name, key)


class Gpu(TorchFunctionMode):
    """A GPU that cannot pin memory, and whose next kernel raises the thread's last error, as CUDA's does in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.error = self.refused = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.error, self.refused = 2, self.refused + 1
        return self.error

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("device") != "cuda":
            return function(*args, **kwargs or {})
        error, self.error = self.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return function(*args, **kwargs | {"device": "cpu"})


def test_kernels_work_where_memory_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(pinned, "REFUSED", Event())
    with Gpu() as gpu:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: gpu)
        for _ in range(3):
            assert pin(mmap.mmap(-1, 4096)) == 0
            assert torch.zeros(1, device="cuda") + 1 == 1
    assert gpu.refused == len(caplog.records) == 1


def test_steps_wait_for_the_disk_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "free_memory", lambda: 0)
    writer = one_rank()
    with writer.start(1, tmp_path, [0], 0, lambda written: None) as copying:
        for number in range(4):
            copying.file(f"part_{number}.pt", named(a=torch.full((10,), float(number))))
            assert len(writer._segments) == 1
    writer.until_written()
    assert not writer._segments, "and memory is given back"
    assert [torch.load(tmp_path / f"part_{n}.pt", weights_only=True)["a"][0] for n in range(4)] == [0, 1, 2, 3]
    writer.close()


def test_memory_stays_at_what_one_checkpoint_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a version, and if a file's tensors change."""
    all_copied, write = Event(), ShardWriter.write

    def write_late(self: ShardWriter, folder: str, piece: Piece) -> Entry:
        assert all_copied.wait(60)
        return write(self, folder, piece)

    monkeypatch.setattr(ShardWriter, "write", write_late)
    monkeypatch.setattr(Segment, "CHUNK", 64 << 10)
    kilobytes = [[1000, *[50] * 20], [*[70] * 20, 1000], [300, 40, 40, 40] * 5]
    payload, writer = 1000 * sum(map(sum, [*kilobytes, kilobytes[0]])), one_rank()
    for step in range(10):
        all_copied.clear()
        files = [*(kilobytes if step < 6 else reversed(kilobytes)), *kilobytes[: step % 2]]
        with writer.start(step, tmp_path, [0], 0, lambda written: None) as copying:
            for number, sizes in enumerate(files):
                tensors = {f"_{i}": torch.full((1000 * size,), step, dtype=torch.uint8) for i, size in enumerate(sizes)}
                copying.file(f"{number}.pt", named(**tensors))
        all_copied.set()
        writer.until_written()
        assert held() < 1.3 * payload, step
        for number, sizes in enumerate(files):
            loaded = torch.load(tmp_path / f"{number}.pt", weights_only=True)
            assert [len(tensor) for tensor in loaded.values()] == [1000 * size for size in sizes]
            assert all((tensor == step).all() for tensor in loaded.values())
    writer.close()
    assert not held()


@pytest.mark.slow
def test_a_dead_process_is_replaced_once_and_failed_copies_are_errors_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = one_rank()
    with writer.start(1, tmp_path, [0], 1000, lambda written: None, converted=saving.PROCESS_BYTES) as copying:
        copying.file("a.pt", named(a=torch.zeros(1)))
    writer.until_written()
    assert writer._worker is not None, "an adapter is small, the model that it is merged into is not"
    os.kill(writer._worker.process.pid, signal.SIGTERM)  # that is for the trainer
    with writer.start(2, tmp_path, [0], saving.PROCESS_BYTES, lambda written: None) as copying:
        copying.file("a.pt", named(a=torch.zeros(1)))
    writer.until_written()
    os.kill(writer._worker.process.pid, signal.SIGKILL)
    with writer.start(3, tmp_path, [0], saving.PROCESS_BYTES, lambda written: None) as copying:
        copying.file("a.pt", named(a=torch.full((1,), 3.0)))
    writer.until_written()
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"] == 3.0
    (tmp_path / "dying.py").write_text("import os\nclass Dying:\n    def write(self, *args): os._exit(7)\n")
    monkeypatch.setattr(saving, "TARGET", f"{tmp_path / 'dying.py'}:Dying")
    writer._worker.kill()
    with writer.start(4, tmp_path, [0], saving.PROCESS_BYTES, lambda written: None) as copying:
        copying.file("a.pt", named(a=torch.zeros(1)))
    with pytest.raises(TransientFault):
        writer.until_written()
    assert writer.failed
    with pytest.raises(ZeroDivisionError), writer.start(5, tmp_path, [0], saving.PROCESS_BYTES, lambda written: None):
        1 / 0  # noqa: B018 - while the state is copied
    writer.let_go()
    assert writer._written is None


def test_ranks_write_in_turn_and_the_first_hears_of_all(tmp_path: Path, writers: list[CheckpointWriter]) -> None:
    folder, all_written = tmp_path / ".global_step_1.tmp-0", []
    folder.mkdir()
    for writer in reversed(writers):
        rank = writer._ranks.rank
        with writer.start(1, folder, [0, 1], 0, all_written.append) as copying:
            for part in (0, 1):
                copying.file(f"{rank}_{part}.pt", named(a=torch.full((5,), float(rank))))
    for writer in writers:
        writer.until_written()
    assert sorted(all_written[0]) == ["0_0.pt", "0_1.pt", "1_0.pt", "1_1.pt"] and len(all_written) == 1
    times = [(folder / f"{rank}_{part}.pt").stat().st_mtime_ns for part in (0, 1) for rank in (0, 1)]
    assert times == sorted(times)
    folder = tmp_path / ".global_step_2.tmp-0"
    folder.mkdir()
    with writers[0].start(2, folder, [0, 0], 0, all_written.append):
        pass
    (folder / "actor").write_text("a file in the place of a folder")
    with writers[1].start(2, folder, [0, 0], 0, all_written.append) as copying:
        copying.small["actor/1.pt"] = b"1"
    for writer in writers:
        with pytest.raises(TrinityError, match=r"1\.pt"):
            writer.until_written()
    assert len(all_written) == 1


def test_a_rank_may_still_be_marking_when_the_first_has_read_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: list[CheckpointWriter]
) -> None:
    folder, written = tmp_path / ".global_step_1.tmp-0", Event()
    folder.mkdir()
    replace = Path.replace

    def replace_and_wait(self: Path, target: Path) -> None:
        replace(self, target)
        if target.name == "all_1.json":
            assert written.wait(10)

    monkeypatch.setattr(Path, "replace", replace_and_wait)
    for writer in writers:
        with writer.start(1, folder, [0, 0], 0, lambda _: written.set()) as copying:
            copying.small[f"{writer._ranks.rank}.json"] = b"{}"
    for writer in writers:
        writer.until_written(10)
    assert not [path for path in tmp_path.iterdir() if path != folder]


def test_file_of_a_rank_that_is_not_in_the_folder_is_refused(tmp_path: Path) -> None:
    """For example if each node has its own folder at the same path."""
    (tmp_path / "here.pt").write_bytes(b"1")
    with pytest.raises(TrinityError, match=r"there\.pt"):
        write_manifest(tmp_path, 1, {name: {"size": 1, "sha256": "0"} for name in ("here.pt", "there.pt")})


def test_a_large_checkpoint_may_have_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk keeps a file open, and many machines allow 1,024 by default."""
    monkeypatch.setattr(Segment, "CHUNK", 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len([*Path("/proc/self/fd").iterdir()]) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        writer = one_rank()
        segment, piece = writer.segment(0, 0), Piece("large.pt")
        for number in range(2 * few):
            segment.add(piece, str(number), torch.full((4096,), number % 256, dtype=torch.uint8))
        writer.let_go()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
