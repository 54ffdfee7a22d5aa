"""What the trainer publishes: by writing, by pushing, and after a resume. Senders and explorers are fakes; no GPU."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saving_helpers import keep_for_resume

from trinity_core.base.errors import TransientFault
from trinity_core.base.layout import JobLayout
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync import nccl
from trinity_core.exchange.sync.memory import MemoryVersions
from trinity_core.exchange.sync.nccl import PushedVersions, PushPublisher, VllmWeights
from trinity_core.exchange.sync.tensorfile import spec_of
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.training import publish
from trinity_core.training.distributed import Ranks
from trinity_core.training.publish import PolicyWeights, Publisher, kept_versions, trainer_rank

ALONE = Ranks(0, 1, torch.device("cpu"))
CHECK = WeightCheck((1, 2), (-1.0,))


class TrainingEngine:
    """Like the trainer's engine: a model with two tied tensors, an untied one and two buffers."""

    def __init__(self) -> None:
        self.module = torch.nn.ModuleDict({"lm": torch.nn.Module()})
        lm: Any = self.module["lm"]
        lm.embeddings, lm.head, lm.norm = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, False), torch.nn.LayerNorm(3)
        lm.head.weight = lm.embeddings.weight
        lm.norm.register_buffer("bias_of_router", torch.ones(2, dtype=torch.float64))
        lm.norm.register_buffer("worked_out", torch.ones(2), persistent=False)
        self.settings = SimpleNamespace(zero_stage=0, dtype=torch.float32)
        self.adapter = None


class Sender:
    """Engines that hold what was sent last. The trainer's weights come from `weights`, where copies are made if
    requested."""

    def __init__(self, versions: MemoryVersions, weights: Any = ()) -> None:
        self.versions, self.weights, self.sent, self.held = versions, weights, [], {}

    def copy(self) -> None: ...

    def send(self, version: int, check: WeightCheck | None = None, kept: Any = None) -> None:
        self.sent.append(version)
        self.held = {name: t.clone() for name, t in (self.weights if kept is None else kept.items())}
        self.versions.publish(version, self.held.items(), check)


@pytest.fixture
def versions(tmp_path: Path) -> PushedVersions:
    return PushedVersions(tmp_path / "shm", spill=tmp_path / "spill")


def rank_zero(explorers_wait: Any = lambda version: True, stopping: Any = lambda: False, engine: Any = None):
    return trainer_rank(PolicyWeights(engine or TrainingEngine()), ALONE, explorers_wait, stopping)


def pushing(
    versions: MemoryVersions, explorers_wait: Any = lambda version: True, stopping: Any = lambda: False,
    timeout: float = 5, engine: Any = None,
):  # fmt: skip
    senders: list[Sender] = []
    trainer = rank_zero(explorers_wait, stopping, engine)

    def connect() -> Sender:
        senders.append(Sender(versions, trainer.weights if engine else ()))
        return senders[-1]

    return PushPublisher(versions, trainer, connect, timeout), senders


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
    """Interval 4, resumed at step 6: the explorer waits for version 4, which new engines cannot get any more."""
    with ExperienceStore.open(f"sqlite:///{tmp_path}/store.db", "run") as store:
        store.expect("explorer")
        publisher, senders = pushing(versions, store.awaited, timeout=0.2)
        with pytest.raises(TransientFault):
            publisher.publish(6, CHECK)
        store.mark_waiting("explorer", 4)
        publisher.publish(6, CHECK)
    assert senders[0].sent == [6] and versions.wait(4, timeout=0) == 6


def test_push_ends_when_the_run_stops_or_no_explorer_waits(versions: PushedVersions) -> None:
    publisher, senders = pushing(versions, lambda version: False, lambda: True)
    publisher.publish(4, CHECK)
    assert not senders and versions.latest() is None
    publisher, senders = pushing(versions, lambda version: False, timeout=0.05)
    with pytest.raises(TransientFault):
        publisher.publish(4, CHECK)


@pytest.mark.parametrize(("style", "waits"), [("fixed", True), ("explorer_driven", False)])
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
        sent = [spec_of(name, tensor) for name, tensor in VllmWeights(weights)]
        assert [spec._replace(same_as="") for spec in specs] == sent
    assert {spec.name: spec.same_as for spec in specs if spec.same_as} == {"head.weight": "embeddings.weight"}


def test_gathered_tensors_are_copied_for_a_push(monkeypatch: Any) -> None:
    """Under ZeRO 3 a tensor is whole only until the next one; vLLM's sender keeps several."""
    engine: Any = TrainingEngine()
    engine.settings.zero_stage = 3
    one = torch.zeros(1)

    def gathered(engine: Any, tied: bool) -> Any:
        for value in (1.0, 2.0):
            yield str(value), one.fill_(value)

    monkeypatch.setattr(publish, "weights", gathered)
    assert [t.item() for _, t in list(VllmWeights(PolicyWeights(engine)))] == [1.0, 2.0]


class Explored:
    """The explorer's progress in explore steps."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> int:
        return self.step


class SmallRun:
    """A trainer whose weights at step n are n everywhere, with its versions in shared memory or in the engines."""

    def __init__(
        self, config: Any, folder: Path, method: str, explored: Explored, waits: Any = lambda version: True
    ) -> None:
        config.job_dir.mkdir(parents=True, exist_ok=True)
        engine: Any = TrainingEngine()
        self.weight = engine.module["lm"].norm.weight
        self.senders: list[Sender] = []
        if method == "nccl":
            self.versions: Any = PushedVersions(folder / "shm", spill=folder / "spill")
            writer, self.senders = pushing(self.versions, waits, stopping=lambda: True, engine=engine)
        else:
            self.versions = MemoryVersions(folder / "shm", spill=folder / "spill")
            writer = self.versions.publisher(config, rank_zero(engine=engine))
        self.publisher = Publisher(config, SimpleNamespace(ranks=ALONE), self.versions, writer, explored)  # type: ignore[arg-type]

    def train(self, step: int) -> None:
        with torch.no_grad():
            self.weight.fill_(step)
        if self.publisher.due(step):
            self.publisher.publish(step)

    def held(self, version: int) -> float:
        """The engines' weights after loading `version`."""
        weights = self.senders[0].held if self.senders else dict(self.versions.load(version))
        return weights["norm.weight"][0].item()


def synchronous(make_config: Any, interval: int = 1, offset: int = 0) -> Any:
    values = {"mode": "both", "synchronizer.sync_interval": interval, "synchronizer.sync_offset": offset}
    return make_config().with_values(values)


@pytest.fixture
def no_check(monkeypatch: Any) -> None:
    monkeypatch.setattr("trinity_core.training.publish.make_weight_check", lambda learner, length: CHECK)


@pytest.mark.parametrize("method", ["memory", "nccl"])
@pytest.mark.parametrize(("interval", "offset"), [(1, 0), (1, 3), (2, 1), (3, 2), (2, 5)])
@pytest.mark.usefixtures("no_check")
def test_resumed_engines_get_each_version_that_is_due(
    make_config: Any, tmp_path: Path, method: str, interval: int, offset: int
) -> None:
    """Saved at any step, with the explorer behind or ahead; then everything but the disk is lost."""
    config = synchronous(make_config, interval, offset)
    schedule = SyncSchedule("fixed", interval, offset)
    for saved in range(1, 8):
        last = next(step for step in count(1) if schedule.required_version(step + 1) > saved)
        for ahead in range(interval + offset):
            explored = Explored()
            folder = tmp_path / f"{saved}-{ahead}"
            checkpoint = folder / "checkpoint"
            checkpoint.mkdir(parents=True)
            explored.step = min(saved + ahead, last)
            since = schedule.required_version(explored.step + 1)
            if method == "nccl" and since < (saved - 1) // interval * interval:
                continue  # the trainer would still wait to push an earlier version
            before = SmallRun(config, folder, method, explored, lambda version, since=since: version <= since)
            before.publisher.publish(0)
            for step in range(1, saved + 1):
                before.train(step)
            keep_for_resume(before.publisher, saved, checkpoint)
            before.versions.remove()

            after = SmallRun(config, folder, method, explored)
            with torch.no_grad():
                after.weight.fill_(saved)
            due = sorted({schedule.required_version(step) for step in range(explored.step + 1, last + 1)})
            after.publisher.rewind(saved)
            after.publisher.resume(saved, checkpoint)
            if method == "nccl":
                pushed = after.senders[0].sent if after.senders else []
                assert pushed == [version for version in due if version], (saved, ahead)
                if 0 in due and len(pushed) < 2:  # with two it is over by the second
                    assert after.versions.has(0), (saved, ahead)
                assert not pushed or after.held(pushed[-1]) == pushed[-1]
            else:
                for version in due:
                    assert after.versions.wait(version, timeout=0) == version, (saved, ahead)
                    assert after.held(version) == (version or 1), "norm weights begin as ones"
            after.versions.remove()


@pytest.mark.usefixtures("no_check")
def test_versions_in_a_checkpoint_are_only_those_still_needed(make_config: Any, tmp_path: Path) -> None:
    config = synchronous(make_config, offset=2)
    explored = Explored()
    run = SmallRun(config, tmp_path, "memory", explored)
    for step in range(8):
        run.train(step)
    for done, versions in ((7, [5, 6]), (8, [6]), (9, [])):
        explored.step = done
        folder = tmp_path / str(done)
        folder.mkdir()
        keep_for_resume(run.publisher, 7, folder)
        assert sorted(kept_versions(folder)) == versions
    run.versions.remove()


@pytest.mark.parametrize(
    ("style", "due"),
    [
        ("fixed", [3, 6]),
        ("trainer_driven", [3, 6]),
        ("explorer_driven", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_trainer_publishes_as_the_style_says(make_config: Any, style: str, due: list[int]) -> None:
    config = make_config(synchronizer__sync_style=style, synchronizer__sync_interval=3)
    publisher = Publisher(config, SimpleNamespace(ranks=ALONE), None, None, Explored())  # type: ignore[arg-type]
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
@pytest.mark.usefixtures("no_check")
def test_resume_finds_weights_after_an_interval_change(
    make_config: Any, tmp_path: Path, step: int, new_interval: int, resumed: int, why: str
) -> None:
    """A run publishes every second step and saves at `step`; another one, with no version in memory, resumes."""
    explored = Explored()
    named = JobLayout(make_config().job_dir).latest_state_dict
    before = SmallRun(synchronous(make_config, 2), tmp_path / "before", "memory", explored)
    for explored.step in range(1, step + 1):
        before.train(explored.step)
    keep_for_resume(before.publisher, step, tmp_path)
    before.versions.remove()
    assert int(named.read_text()) == step - step % 2
    run = SmallRun(synchronous(make_config, new_interval), tmp_path / "after", "memory", explored)
    with torch.no_grad():
        run.weight.fill_(step)
    after = run.publisher
    after.resume(step, tmp_path)
    assert int(named.read_text()) == resumed
    assert after.versions.versions() == [resumed], why
    assert after.versions.check(resumed) == CHECK
    assert dict(after.versions.load(resumed))["norm.weight"].tolist() == [resumed] * 3
    assert after.versions.wait(SyncSchedule("fixed", new_interval).required_version(step + 1), timeout=0) == resumed
    after.versions.remove()
