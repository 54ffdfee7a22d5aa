"""What the trainer publishes: by writing, by pushing, and after a resume. Senders and explorers are fakes; no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trinity_core.errors import TransientFault
from trinity_core.layout import JobLayout
from trinity_core.store.store import ExperienceStore
from trinity_core.sync import nccl
from trinity_core.sync.memory import MemoryVersions
from trinity_core.sync.methods import run_versions
from trinity_core.sync.nccl import PushedVersions, PushPublisher
from trinity_core.sync.nccl_transfer import VllmWeights
from trinity_core.sync.schedule import required_version
from trinity_core.sync.tensorfile import spec_of
from trinity_core.sync.versions import VersionPublisher
from trinity_core.sync.weight_check import WeightCheck
from trinity_core.training import weight_sync
from trinity_core.training.distributed import Ranks
from trinity_core.training.publish import KEPT, Publisher
from trinity_core.training.weight_sync import PolicyWeights, trainer_rank

ALONE = Ranks(0, 1, torch.device("cpu"))
CHECK = WeightCheck((1, 2), (-1.0,))


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
    def __init__(self, versions: MemoryVersions) -> None:
        self.versions, self.sent = versions, []

    def send(self, version: int, check: WeightCheck | None = None) -> None:
        self.sent.append(version)
        self.versions.publish(version, [], check)


@pytest.fixture
def versions(tmp_path: Path) -> PushedVersions:
    return PushedVersions(tmp_path / "shm", spill=tmp_path / "spill")


def rank_zero(explorers_wait: Any = lambda version: True, stopping: Any = lambda: False, engine: Any = None):
    return trainer_rank(engine or TrainingEngine(), ALONE, explorers_wait, stopping)


def pushing(
    versions: MemoryVersions, explorers_wait: Any = lambda version: True, stopping: Any = lambda: False,
    timeout: float = 5,
):  # fmt: skip
    senders: list[Sender] = []

    def connect() -> Sender:
        senders.append(Sender(versions))
        return senders[-1]

    return PushPublisher(versions, rank_zero(explorers_wait, stopping), connect, timeout), senders


@pytest.mark.parametrize(
    ("method", "publisher"),
    [("nccl", PushPublisher), ("memory", VersionPublisher), ("checkpoint", VersionPublisher)],
)
def test_sync_method_chooses_the_publisher(make_config: Any, method: str, publisher: type) -> None:
    config = make_config().with_values({"synchronizer.sync_method": method})
    versions = run_versions(config)
    assert type(versions.publisher(config, rank_zero())) is publisher
    assert versions.keeps_tensors == (method != "nccl")


def test_version_0_is_not_pushed(versions: PushedVersions) -> None:
    publisher, senders = pushing(versions)
    publisher.publish(0, CHECK)
    assert versions.latest() == 0 and not senders
    assert versions.values(0, "bfloat16").keys() == {spec.name for spec in PolicyWeights(TrainingEngine()).specs()}
    publisher.publish(1, CHECK)
    publisher.publish(2, CHECK)
    assert [sender.sent for sender in senders] == [[1, 2]], "one connection for all"
    assert versions.check(2) == CHECK


def test_push_waits_until_explorers_wait(versions: PushedVersions) -> None:
    asked: list[int] = []

    def explorers_wait(version: int) -> bool:
        asked.append(version)
        return len(asked) == 3

    publisher, senders = pushing(versions, explorers_wait)
    publisher.publish(1, CHECK)
    assert asked == [1, 1, 1] and senders[0].sent == [1]
    asked.clear()
    publisher.publish(4, CHECK)
    assert asked == [4, 4, 4] and senders[0].sent == [1, 4]


def test_push_after_resume_serves_waits_for_older_versions(versions: PushedVersions, tmp_path: Path) -> None:
    """Interval 4, resumed at step 6: the explorer waits for version 4, which new engines can no longer be given."""
    with ExperienceStore.open(f"sqlite:///{tmp_path}/store.db", "run") as store:
        store.expect("explorer")
        publisher, senders = pushing(versions, store.awaited, timeout=0.2)
        with pytest.raises(TransientFault, match="version 6"):
            publisher.publish(6, CHECK)
        store.waiting("explorer", 4)
        publisher.publish(6, CHECK)
    assert senders[0].sent == [6] and versions.wait(4, timeout=0) == 6


def test_push_ends_when_the_run_stops_or_nobody_asks(versions: PushedVersions) -> None:
    publisher, senders = pushing(versions, lambda version: False, lambda: True)
    publisher.publish(4, CHECK)
    assert not senders and versions.latest() is None
    publisher, senders = pushing(versions, lambda version: False, timeout=0.05)
    with pytest.raises(TransientFault, match="version 4"):
        publisher.publish(4, CHECK)


@pytest.mark.parametrize(("style", "waits"), [("fixed", True), ("dynamic_by_explorer", False)])
def test_push_waits_for_explorers_in_fixed_style_only(
    make_config: Any, style: str, waits: bool, monkeypatch: Any, versions: PushedVersions
) -> None:
    config = make_config().with_values({"synchronizer.sync_method": "nccl", "synchronizer.sync_style": style})
    monkeypatch.setattr(nccl, "connect_engines", lambda *_: Sender(versions))
    publisher = versions.publisher(config, rank_zero(lambda version: False, lambda: True))
    publisher.publish(3, CHECK)
    assert (versions.latest() == 3) is not waits


def test_specs_match_tensors_with_tied_ones_and_buffers() -> None:
    weights = PolicyWeights(TrainingEngine())
    specs = weights.specs()
    assert {spec.name for spec in specs} == {
        "embeddings.weight", "head.weight", "norm.weight", "norm.bias", "norm.bias_of_router",
    }  # fmt: skip
    for _ in range(2):
        assert specs == [spec_of(name, tensor) for name, tensor in VllmWeights(weights)]


def test_gathered_tensors_are_copied_for_a_push(monkeypatch: Any) -> None:
    """Under ZeRO 3 a tensor is whole only until the next one; vLLM's sender keeps several."""
    engine: Any = TrainingEngine()
    engine.settings.zero_stage = 3
    one = torch.zeros(1)

    def gathered(engine: Any, tied: bool) -> Any:
        for value in (1.0, 2.0):
            yield str(value), one.fill_(value)

    monkeypatch.setattr(weight_sync, "weights", gathered)
    assert [t.item() for _, t in list(VllmWeights(PolicyWeights(engine)))] == [1.0, 2.0]


def test_push_resumes_between_syncs_with_the_checkpoints_version(
    make_config: Any, versions: PushedVersions, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: CHECK)
    config = make_config(synchronizer__sync_interval=2)
    config.job_dir.mkdir(parents=True)
    pusher, senders = pushing(versions)
    publisher = Publisher(config, SimpleNamespace(ranks=ALONE), versions, pusher)  # type: ignore[arg-type]
    assert publisher.due(2) and not publisher.due(3)
    publisher.publish(2)
    publisher.keep_for_resume(3, tmp_path)
    assert not (tmp_path / KEPT).exists(), "there are no tensors to keep"
    publisher.resume(3, tmp_path)
    assert senders[0].sent == [2, 3]


@pytest.mark.parametrize(
    ("style", "due"),
    [
        ("fixed", [3, 6]),
        ("dynamic_by_trainer", [3, 6]),
        ("explorer_driven", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_trainer_publishes_as_the_style_says(make_config: Any, style: str, due: list[int]) -> None:
    config = make_config(synchronizer__sync_style=style, synchronizer__sync_interval=3)
    publisher = Publisher(config, SimpleNamespace(ranks=ALONE), None, None)  # type: ignore[arg-type]
    assert [step for step in range(1, 7) if publisher.due(step)] == due


@pytest.mark.parametrize(
    ("step", "new_interval", "resumed", "why"),
    [
        (5, 2, 4, "the older one"),
        (7, 4, 6, "a newer one than was due"),
        (6, 4, 6, "there is none older"),
        (5, 3, 4, "it is newer than version 3"),
        (7, 7, 7, "version 6 is too old"),
    ],
)
def test_resume_finds_weights_after_an_interval_change(
    make_config: Any, tmp_path: Path, monkeypatch: Any, step: int, new_interval: int, resumed: int, why: str
) -> None:
    """A run publishes every second step and saves at `step`; another one, with no version in memory, resumes."""
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: CHECK)
    engine: Any = TrainingEngine()
    weight = engine.module["lm"].norm.weight

    def publisher(name: str, interval: int) -> Publisher:
        versions = MemoryVersions(tmp_path / name, spill=tmp_path / "spill")
        config = make_config(synchronizer__sync_interval=interval)
        config.job_dir.mkdir(parents=True, exist_ok=True)
        writer = VersionPublisher(versions, rank_zero(engine=engine))
        return Publisher(config, SimpleNamespace(ranks=ALONE), versions, writer)  # type: ignore[arg-type]

    def train(step: int) -> None:
        with torch.no_grad():
            weight.fill_(step)

    named = JobLayout(make_config().job_dir).latest_state_dict
    before, after = publisher("before", 2), publisher("after", new_interval)
    for number in range(1, step + 1):
        train(number)
        if before.due(number):
            before.publish(number)
    before.keep_for_resume(step, tmp_path)
    before.versions.remove()
    assert int(named.read_text()) == step - step % 2
    after.resume(step, tmp_path)
    assert int(named.read_text()) == resumed
    assert after.versions.versions() == [resumed], why
    assert after.versions.check(resumed) == CHECK
    assert dict(after.versions.load(resumed))["norm.weight"].tolist() == [resumed] * 3
    assert after.versions.wait(required_version(step + 1, new_interval), timeout=0) == resumed
    after.versions.remove()


def test_kept_weights_without_a_version_are_ignored(make_config: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner: CHECK)
    engine: Any = TrainingEngine()
    config = make_config(synchronizer__sync_interval=2)
    config.job_dir.mkdir(parents=True)
    save_file({"norm.weight": torch.zeros(3)}, tmp_path / KEPT)
    versions = MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    writer = VersionPublisher(versions, rank_zero(engine=engine))
    Publisher(config, SimpleNamespace(ranks=ALONE), versions, writer).resume(3, tmp_path)  # type: ignore[arg-type]
    assert versions.versions() == [3]
