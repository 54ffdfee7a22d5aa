"""Published versions: whole, unchanged while in use, rewound and removed, in shared memory and in checkpoints."""

import errno
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from forkserver import PROCESSES

from trinity_core.base import files
from trinity_core.base.errors import DataError, TransientFault, TrinityError
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.exchange.sync import memory
from trinity_core.exchange.sync.checkpoint import CheckpointVersions
from trinity_core.exchange.sync.memory import MemoryVersions, memory_root
from trinity_core.exchange.sync.tensorfile import TensorSpec, digest, value_digest
from trinity_core.exchange.sync.versions import VersionGone, VersionRecord, open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck


def tensors(version, size=1000):
    head = torch.full((4, size // 4), float(version))
    return [
        ("embed.weight", head),
        ("norm.weight", torch.full((7,), version, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 3)),
        ("steps", torch.tensor(version)),
        ("lm_head.weight", head),
    ]


@pytest.fixture(
    params=[name for name, method in SYNC_METHODS.items() if not method.vllm_backend and name != "champion"]
)
def folder(request, tmp_path):
    """The versions of each sync method by which a trainer publishes tensors; a new method is tested without an edit
    here."""
    versions = open_versions(request.param, tmp_path)
    yield versions
    versions.remove()


def loaded(folder, version):
    return dict(folder.load(version))


def test_dtypes_aliases_and_weight_check_round_trip(folder):
    check = WeightCheck((1, 2, 3), (-0.5, -1.25), "bfloat16")
    folder.publish(3, tensors(3), check)
    got = loaded(folder, 3)
    assert set(got) == set(dict(tensors(3)))
    for name, tensor in tensors(3):
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype
    assert got["lm_head.weight"].data_ptr() == got["embed.weight"].data_ptr()
    assert folder.latest() == 3
    assert folder.check(3) == check


def test_digests_of_values_follow_the_engines_dtype(folder):
    folder.publish(2, tensors(2))
    for dtype in ("float32", "bfloat16"):
        values = folder.values(2, dtype)
        assert values == {name: value_digest(tensor, dtype) for name, tensor in tensors(2)}
    assert values["lm_head.weight"] == values["embed.weight"]


def test_digests_are_published_in_the_engines_dtype(folder):
    """What is on the disk is not digested again: a version that was damaged there would agree with itself."""
    folder.digest_dtype = "bfloat16"
    record = folder.publish(2, tensors(2))
    floats = {name for name, tensor in tensors(2) if tensor.is_floating_point()}
    assert {record.digests[name].dtype for name in floats} == {"bfloat16"}
    path = folder._record_path(2).parent / record.file
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    assert folder.values(2, "bfloat16") == {name: value_digest(tensor, "bfloat16") for name, tensor in tensors(2)}


def test_a_base_that_was_digested_in_another_dtype_is_not_compared(folder):
    """That of an adapter, which is not written: its digests cannot be made again."""
    base = {"base": digest(torch.ones(3), dtype="bfloat16"), "base.steps": digest(torch.tensor(2))}
    folder.publish(2, tensors(2), pushed=base)
    assert folder.values(2, "bfloat16").keys() == {*dict(tensors(2)), *base}
    assert folder.values(2, "float32") == {name: value_digest(tensor, "float32") for name, tensor in tensors(2)}


def test_only_the_newest_versions_stay(folder):
    for version in range(6):
        folder.publish(version, tensors(version), keep=3)
    assert folder.versions() == [3, 4, 5]
    with pytest.raises(VersionGone):
        folder.load(2)


def test_views_keep_their_values_while_alive(folder):
    folder.publish(0, tensors(0))
    held = loaded(folder, 0)
    kept = held["norm.weight"]
    del held
    for version in range(1, 8):
        folder.publish(version, tensors(version))
    assert kept.unique().tolist() == [0.0]


def test_writes_to_a_view_are_private(folder):
    folder.publish(1, tensors(1))
    loaded(folder, 1)["embed.weight"].fill_(99)
    assert loaded(folder, 1)["embed.weight"].unique().tolist() == [1.0]


def test_publishing_a_version_again_replaces_it(folder):
    folder.publish(4, tensors(4))
    old = loaded(folder, 4)
    folder.publish(4, tensors(5, size=2000))
    assert loaded(folder, 4)["embed.weight"].shape == (4, 500)
    assert old["embed.weight"].unique().tolist() == [4.0]


def test_publishing_with_specs_takes_one_tensor_at_a_time(folder):
    specs = [TensorSpec(f"layer.{i}", "float32", (10,)) for i in range(4)]
    scratch = torch.empty(10)  # the same memory for each: what a gather of partitions does
    folder.publish(1, ((spec.name, scratch.fill_(i)) for i, spec in enumerate(specs)), specs=specs)
    assert [t[0].item() for _, t in sorted(folder.load(1))] == [0, 1, 2, 3]


def test_specs_say_which_tensors_are_tied(folder):
    specs = [TensorSpec("embed", "float32", (10,)), TensorSpec("head", "float32", (10,), same_as="embed")]
    scratch = torch.ones(10)
    record = folder.publish(1, ((spec.name, scratch) for spec in specs), specs=specs)
    assert record.aliases == {"head": "embed"} and record.digests["head"] == record.digests["embed"]
    assert record.size < 2 * scratch.nbytes + 512
    assert {name: t.tolist() for name, t in folder.load(1)} == {"embed": [1.0] * 10, "head": [1.0] * 10}


@pytest.mark.parametrize(
    "given",
    [
        [("a", torch.zeros(2))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3))],
        [("a", torch.zeros(2)), ("c", torch.zeros(2))],
        [("a", torch.zeros(2)), ("a", torch.zeros(2))],
    ],
)
def test_failed_publication_leaves_the_last_version(folder, given):
    folder.publish(1, tensors(1))
    specs = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (2,))]
    with pytest.raises(DataError):
        folder.publish(2, iter(given), specs=specs)
    assert folder.latest() == 1
    assert loaded(folder, 1)["norm.weight"][0] == 1
    folder.publish(2, tensors(2))
    assert folder.latest() == 2


def test_rewind_removes_newer_versions(folder):
    for version in range(4):
        folder.publish(version, tensors(version), keep=9)
    assert folder.rewind(1) == [2, 3]
    assert folder.versions() == [0, 1]
    assert folder.latest() == 1
    assert folder.rewind(-1) == [0, 1]
    assert folder.latest() is None


def test_version_whose_tensors_were_removed_is_not_whole(folder):
    for version in (1, 2):
        folder.publish(version, tensors(version))
    (folder._record_path(1).parent / folder.record(1).file).unlink()
    assert folder.whole() == [2]


def test_wait_returns_a_version_published_later(folder):
    publisher = threading.Timer(0.1, lambda: folder.publish(2, tensors(2)))
    publisher.start()
    start = time.monotonic()
    assert folder.wait(2, timeout=20) == 2
    assert time.monotonic() - start < 10
    publisher.join()  # the version is there before it has returned, and the folder goes with the test


def test_wait_returns_a_newer_version_if_the_asked_one_is_gone(folder):
    folder.publish(6, tensors(6))
    assert folder.wait(4, timeout=5) == 6


def test_wait_ends_on_stop_and_on_timeout(folder):
    assert folder.wait(1, timeout=60, stop=lambda: True) is None
    with pytest.raises(TransientFault):
        folder.wait(1, timeout=0.05)


def test_rewind_removes_all_pushed_versions(tmp_path):
    """A run that resumes from step 5 has new engines, which hold nothing of version 5."""
    pushed = open_versions("nccl", tmp_path)
    for version in (0, 5):
        pushed.publish(version, [])
    assert pushed.rewind(5) == [0, 5] and not pushed.has(5)
    pushed.remove()


def test_other_nodes_see_which_version_was_pushed(tmp_path, monkeypatch):
    """Each has a shared memory of its own; what a checkpoint needs of the tensors stays in the trainer's."""
    nodes = {}
    for name in ("trainer", "explorer"):
        monkeypatch.setattr(
            "trinity_core.exchange.sync.nccl.memory_root", lambda job_dir, name=name: tmp_path / name / "shm"
        )
        nodes[name] = open_versions("nccl", tmp_path / "job")
    nodes["trainer"].publish(3, [])
    assert nodes["explorer"].wait(3, timeout=0.05) == 3
    nodes["trainer"].publish(4, tensors(4))
    assert nodes["explorer"].latest() == 4 and loaded(nodes["trainer"], 4)["steps"] == 4
    assert not [*tmp_path.glob("job/**/*.safetensors")] and not (tmp_path / "explorer").exists()
    nodes["trainer"].remove()
    assert nodes["explorer"].versions() == [] and not [*(tmp_path / "trainer").glob("**/*.safetensors")]


def test_temporary_directory_replaces_missing_shared_memory(tmp_path, caplog):
    assert memory_root(tmp_path, shared_memory=tmp_path / "missing").parent != tmp_path
    assert "weights go through" in caplog.text


def test_slots_are_reused(tmp_path):
    folder = MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    for version in range(10):
        folder.publish(version, tensors(version), keep=2)
    assert len(folder._slot_paths()) == 3


def test_extra_slots_of_a_slow_reader_are_deleted(tmp_path):
    folder = MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    held = []
    for version in range(5):
        folder.publish(version, tensors(version), keep=1)
        held.append(loaded(folder, version))
    assert len(folder._slot_paths()) == 5
    held.clear()
    folder.publish(5, tensors(5), keep=1)
    assert len(folder._slot_paths()) == 2


def test_full_shared_memory_spills_to_disk(tmp_path, monkeypatch, caplog):
    root = tmp_path / "shm"
    real = os.posix_fallocate

    def fallocate(handle, offset, size):
        if str(root) in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(28, "No space left on device")
        real(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    folder = MemoryVersions(root, spill=tmp_path / "spill")
    folder.publish(1, tensors(1))
    assert loaded(folder, 1)["steps"] == 1
    assert "no room" in caplog.text
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    monkeypatch.setattr(files, "ROOM_SECONDS", 0.0)
    with pytest.raises(TrinityError):
        folder.publish(2, tensors(2))
    assert loaded(folder, 1)["steps"] == 1


def test_weights_go_into_no_file_that_another_user_prepared(shared, tmp_path):
    """The temporary directory is everybody's: whoever made the file there can read and change what is written to it."""
    folder = MemoryVersions(memory_root(tmp_path / "run", shared))
    bait = tmp_path / "bait"
    bait.mkdir()
    (bait / "slot_00000000.safetensors").touch()
    Path(tempfile.gettempdir(), f"{folder.root.name}-spill").symlink_to(bait)
    folder.publish(1, tensors(1))
    assert loaded(folder, 1)["steps"] == 1
    assert [path.stat().st_size for path in bait.iterdir()] == [0]


def test_one_publisher_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "LOCK_SECONDS", 0.1)
    first, second = (MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill") for _ in range(2))
    first.publish(0, tensors(0))
    with pytest.raises(TrinityError):
        second.publish(1, tensors(1))
    del first
    second.publish(1, tensors(1))
    assert second.versions() == [0, 1]


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A shared memory and a temporary directory of one's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path / "shm"


def test_next_run_removes_the_weights_of_a_killed_run(shared, tmp_path):
    killed = memory_root(tmp_path / "killed", shared)
    publisher = PROCESSES.Process(target=_publish_for_ever, args=(killed,), daemon=True)
    publisher.start()
    patience = time.monotonic() + 60
    while MemoryVersions(killed).latest() is None and time.monotonic() < patience:
        time.sleep(0.01)
    spilled = tmp_path / "tmp" / f"{killed.name}-spill"
    spilled.mkdir()
    first, second = (MemoryVersions(memory_root(tmp_path / name, shared)) for name in ("first", "second"))
    first.publish(1, tensors(1))
    assert killed.exists(), "its publisher lives"
    os.kill(publisher.pid, signal.SIGKILL)
    publisher.join()
    second.publish(1, tensors(1))
    assert sorted(shared.iterdir()) == sorted([first.root, second.root])
    assert not spilled.exists()
    first.publish(2, tensors(2))
    assert loaded(first, 2)["steps"] == 2


def test_a_sweep_leaves_what_is_in_use_or_not_ours(shared, tmp_path, monkeypatch):
    mine, elsewhere = memory_root(tmp_path / "made", shared), MemoryVersions(tmp_path / "elsewhere")
    mine.mkdir()
    elsewhere.publish(1, tensors(1))
    (shared / "trinity-link").symlink_to(elsewhere.root)
    (shared / "trinity-file").touch()
    (shared / "other").mkdir()
    elsewhere._owner = None
    memory.sweep(shared / "trinity-next")
    assert {path.name for path in shared.iterdir()} == {mine.name, "trinity-link", "trinity-file", "other"}
    assert elsewhere.versions() == [1]
    monkeypatch.setattr(os, "getuid", lambda: -1)
    (mine / "publisher.lock").touch()
    memory.sweep(shared / "trinity-next")
    assert mine.exists()
    monkeypatch.undo()
    memory.sweep(shared / "trinity-next")
    assert not mine.exists()


def test_run_restarts_while_its_folder_is_swept(shared, tmp_path):
    root, done = memory_root(tmp_path / "again", shared), threading.Event()

    def sweep_on():
        while not done.is_set():
            memory.sweep(shared / "trinity-other")

    sweepers = [threading.Thread(target=sweep_on) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        for version in range(1, 100):
            folder = MemoryVersions(root)
            folder.publish(version, tensors(version))
            assert loaded(folder, version)["steps"] == version
            assert folder.latest() == version
            folder._owner = None
    finally:
        done.set()
        for sweeper in sweepers:
            sweeper.join()
    memory.sweep(shared / "trinity-other")
    assert not list(shared.iterdir())


def test_damaged_file_is_refused(tmp_path):
    folder = CheckpointVersions(tmp_path)
    folder.publish(1, tensors(1))
    path = tmp_path / "global_step_1" / "actor" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError):
        folder.load(1)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.json", "latest_state_dict_iteration.txt"])
def test_file_that_another_machine_removed_is_missing(tmp_path, monkeypatch, name):
    """NFS then reports a stale file handle."""
    folder, real, stale = CheckpointVersions(tmp_path), Path.open, [True, False]
    folder.publish(1, tensors(1))

    def open_file(path, *args, **options):
        if path.name == name and stale and stale.pop(0):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", open_file)
    assert folder.latest() == 1
    assert loaded(folder, 1)["steps"] == 1
    if name != "latest_state_dict_iteration.txt":
        stale += [True] * 1000
        with pytest.raises(VersionGone):
            folder.load(1)


def test_removing_a_version_spares_the_full_checkpoint(tmp_path):
    folder = CheckpointVersions(tmp_path)
    folder.publish(1, tensors(1), keep=1)
    (tmp_path / "global_step_1" / "manifest.json").write_text("{}")
    folder.publish(2, tensors(2), keep=1)
    folder.publish(3, tensors(3), keep=1)
    assert [path.name for path in sorted(tmp_path.glob("global*"))] == ["global_step_1", "global_step_3"]
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "3\n"


def test_full_disk_is_a_clear_error(tmp_path, monkeypatch):
    folder = CheckpointVersions(tmp_path)
    folder.publish(1, tensors(1))
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(TrinityError):
        folder.publish(2, tensors(2))
    assert folder.versions() == [1]


def _publish_for_ever(root):
    torch.set_num_threads(1)
    folder = MemoryVersions(root, spill=root.with_name("spill"))
    version = (folder.latest() or 0) + 1
    while True:
        folder.publish(version, tensors(version, size=400_000), keep=1)
        version += 1


def test_no_torn_version_under_kill(tmp_path):
    """A publisher at full speed, killed and started again; a reader at full speed sees only whole versions."""
    root = tmp_path / "shm"
    folder = MemoryVersions(root, spill=tmp_path / "spill")
    seen = set()
    for _ in range(3):
        publisher = PROCESSES.Process(target=_publish_for_ever, args=(root,), daemon=True)
        publisher.start()
        try:
            before, patience = folder.latest(), time.monotonic() + 60
            while folder.latest() == before and time.monotonic() < patience:
                time.sleep(0.01)
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                version = folder.latest()
                if version is None:
                    continue
                try:
                    got = loaded(folder, version)
                except VersionGone:
                    continue
                assert got["embed.weight"].unique().tolist() == [version]
                assert got["norm.weight"].unique().item() == torch.tensor(version, dtype=torch.bfloat16).item()
                seen.add(version)
        finally:
            os.kill(publisher.pid, signal.SIGKILL)
            publisher.join()
    assert len(seen) > 3
    assert isinstance(folder.record(folder.latest()), VersionRecord)
