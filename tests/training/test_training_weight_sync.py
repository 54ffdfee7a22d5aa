"""The choice between a folder and a push, and what a push does. No GPU: the sender and the explorers are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trinity_core.errors import TransientFault
from trinity_core.store.store import ExperienceStore
from trinity_core.sync.memory import MemoryVersions
from trinity_core.sync.schedule import required_version
from trinity_core.sync.tensorfile import spec_of
from trinity_core.sync.weight_check import WeightCheck
from trinity_core.training import weight_sync
from trinity_core.training.distributed import Ranks
from trinity_core.training.publish import KEPT, Publisher
from trinity_core.training.weight_sync import FolderHandOver, PushHandOver, open_hand_over, specs_of, trainer_weights

ALONE = Ranks(0, 1, torch.device("cpu"))
PROBE = WeightCheck((1, 2), (-1.0,))


class TrainingEngine:
    """A model of two tied tensors, one of its own and two buffers, as the trainer's engine shows it."""

    def __init__(self) -> None:
        self.module = torch.nn.ModuleDict({"lm": torch.nn.Module()})
        lm: Any = self.module["lm"]
        lm.embeddings, lm.head, lm.norm = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, False), torch.nn.LayerNorm(3)
        lm.head.weight = lm.embeddings.weight
        lm.norm.register_buffer("bias_of_router", torch.ones(2, dtype=torch.float64))
        lm.norm.register_buffer("worked_out", torch.ones(2), persistent=False)
        self.settings = SimpleNamespace(zero_stage=0, dtype=torch.float32)


class Sender:
    def __init__(self, folder: MemoryVersions) -> None:
        self.folder, self.sent = folder, []

    def send(self, version: int, probe: WeightCheck | None = None) -> None:
        self.sent.append(version)
        self.folder.publish(version, [], probe)


@pytest.fixture
def folder(tmp_path: Path) -> MemoryVersions:
    return MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")


def pushing(
    folder: MemoryVersions, awaited: Any = lambda version: True, stopping: Any = lambda: False, timeout: float = 5
):
    senders: list[Sender] = []

    def connect() -> Sender:
        senders.append(Sender(folder))
        return senders[-1]

    return PushHandOver(ALONE, folder, connect, awaited, stopping, timeout), senders


@pytest.mark.parametrize(
    ("method", "way"), [("nccl", PushHandOver), ("memory", FolderHandOver), ("checkpoint", FolderHandOver)]
)
def test_the_configuration_chooses(make_config: Any, method: str, way: type, monkeypatch: Any) -> None:
    config = make_config().with_values({"synchronizer.sync_method": method})
    found = open_hand_over(config, TrainingEngine(), ALONE, lambda version: False, lambda: True)
    assert type(found) is way
    assert found.keeps_tensors == (method != "nccl")


def test_version_0_is_what_engines_start_with(folder: MemoryVersions) -> None:
    way, senders = pushing(folder)
    way.give(0, PROBE)
    assert folder.latest() == 0 and not senders
    way.give(1, PROBE)
    way.give(2, PROBE)
    assert [sender.sent for sender in senders] == [[1, 2]], "one connection for all"
    assert folder.probe(2) == PROBE


def test_a_push_waits_until_explorers_wait(folder: MemoryVersions) -> None:
    asked: list[int] = []

    def awaited(version: int) -> bool:
        asked.append(version)
        return len(asked) == 3

    way, senders = pushing(folder, awaited)
    way.give(1, PROBE)
    assert asked == [1, 1, 1] and senders[0].sent == [1]
    asked.clear()
    way.give(4, PROBE)
    assert asked == [4, 4, 4] and senders[0].sent == [1, 4]


def test_a_push_after_a_resume_goes_to_whoever_waits_for_an_older_version(
    folder: MemoryVersions, tmp_path: Path
) -> None:
    """Interval 4, resumed at step 6: the explorer waits for version 4, which new engines can no longer be given."""
    with ExperienceStore.open(f"sqlite:///{tmp_path}/store.db", "run") as store:
        store.expect("explorer")
        way, senders = pushing(folder, store.awaited, timeout=0.2)
        with pytest.raises(TransientFault, match="version 6"):
            way.give(6, PROBE)
        store.waiting("explorer", 4)
        way.give(6, PROBE)
    assert senders[0].sent == [6] and folder.wait(4, timeout=0) == 6


def test_a_push_is_given_up_when_the_run_stops_and_fails_when_nobody_asks(folder: MemoryVersions) -> None:
    way, senders = pushing(folder, lambda version: False, lambda: True)
    way.give(4, PROBE)
    assert not senders and folder.latest() is None
    way, senders = pushing(folder, lambda version: False, timeout=0.05)
    with pytest.raises(TransientFault, match="version 4"):
        way.give(4, PROBE)


@pytest.mark.parametrize(("style", "waits"), [("fixed", True), ("dynamic_by_explorer", False)])
def test_explorers_are_waited_for_in_fixed_style_alone(
    make_config: Any, style: str, waits: bool, monkeypatch: Any, folder: MemoryVersions
) -> None:
    config = make_config().with_values({"synchronizer.sync_method": "nccl", "synchronizer.sync_style": style})
    monkeypatch.setattr(weight_sync, "open_versions", lambda method, job_dir: folder)
    monkeypatch.setattr(weight_sync, "connect_engines", lambda *_: Sender(folder))
    way = open_hand_over(config, TrainingEngine(), ALONE, lambda version: False, lambda: True)
    way.give(3, PROBE)
    assert (folder.latest() == 3) is not waits


def test_specs_and_tensors_agree_tied_ones_twice_and_buffers_too() -> None:
    engine: Any = TrainingEngine()
    specs = specs_of(engine)
    assert {spec.name for spec in specs} == {
        "embeddings.weight", "head.weight", "norm.weight", "norm.bias", "norm.bias_of_router",
    }  # fmt: skip
    for _ in range(2):
        tensors = list(trainer_weights(engine))
        assert specs == [spec_of(name, tensor) for name, tensor in tensors]


def test_gathered_tensors_outlive_their_turn(monkeypatch: Any) -> None:
    """Under ZeRO 3 a tensor is whole only until the next one; the sender keeps several."""
    engine: Any = TrainingEngine()
    engine.settings.zero_stage = 3
    one = torch.zeros(1)

    def gathered(engine: Any, tied: bool) -> Any:
        for value in (1.0, 2.0):
            yield str(value), one.fill_(value)

    monkeypatch.setattr(weight_sync, "weights", gathered)
    assert [t.item() for _, t in list(weight_sync._lasting(engine))] == [1.0, 2.0]


def test_between_two_hand_overs_a_push_resumes_with_the_checkpoints_own_version(
    make_config: Any, folder: MemoryVersions, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: PROBE)
    config = make_config(synchronizer__sync_interval=2)
    config.job_dir.mkdir(parents=True)
    way, senders = pushing(folder)
    publisher = Publisher(config, SimpleNamespace(ranks=ALONE), way)  # type: ignore[arg-type]
    assert publisher.due(2) and not publisher.due(3)
    publisher.publish(2)
    publisher.keep_for_resume(3, tmp_path)
    assert not (tmp_path / KEPT).exists(), "there are no tensors to keep"
    publisher.resume(3, tmp_path)
    assert senders[0].sent == [2, 3]


@pytest.mark.parametrize(
    ("step", "new_interval", "resumed", "told"),
    [
        (5, 2, 4, "the older one"),
        (7, 4, 6, "a newer one than was due"),
        (6, 4, 6, "there is none older"),
        (5, 3, 4, "it is newer than version 3"),
        (7, 7, 7, "version 6 is too old"),
    ],
)
def test_a_resume_finds_weights_whatever_the_interval_was(
    make_config: Any, tmp_path: Path, monkeypatch: Any, step: int, new_interval: int, resumed: int, told: str
) -> None:
    """A run hands over every second step and saves at `step`; another one, with no version in memory, goes on."""
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: PROBE)
    engine: Any = TrainingEngine()
    weight = engine.module["lm"].norm.weight

    def publisher(name: str, interval: int) -> Publisher:
        way = FolderHandOver(engine, ALONE, MemoryVersions(tmp_path / name, spill=tmp_path / "spill"))
        config = make_config(synchronizer__sync_interval=interval)
        config.job_dir.mkdir(parents=True, exist_ok=True)
        return Publisher(config, SimpleNamespace(ranks=ALONE), way)  # type: ignore[arg-type]

    def train(step: int) -> None:
        with torch.no_grad():
            weight.fill_(step)

    before, after = publisher("before", 2), publisher("after", new_interval)
    for number in range(1, step + 1):
        train(number)
        if before.due(number):
            before.publish(number)
    before.keep_for_resume(step, tmp_path)
    before.folder.remove()
    assert int(before.told.read_text()) == step - step % 2
    after.resume(step, tmp_path)
    assert int(after.told.read_text()) == resumed
    assert after.folder.versions() == [resumed], told
    assert after.folder.probe(resumed) == PROBE
    assert dict(after.folder.load(resumed))["norm.weight"].tolist() == [resumed] * 3
    assert after.folder.wait(required_version(step + 1, new_interval), timeout=0) == resumed
    after.folder.remove()


def test_kept_weights_that_do_not_say_their_version_are_not_used(
    make_config: Any, folder: MemoryVersions, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: PROBE)
    engine: Any = TrainingEngine()
    config = make_config(synchronizer__sync_interval=2)
    config.job_dir.mkdir(parents=True)
    save_file({"norm.weight": torch.zeros(3)}, tmp_path / KEPT)
    Publisher(config, SimpleNamespace(ranks=ALONE), FolderHandOver(engine, ALONE, folder)).resume(3, tmp_path)  # type: ignore[arg-type]
    assert folder.versions() == [3]
