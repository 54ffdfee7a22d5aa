"""The sync method `nccl` as far as it runs without a GPU: ranks, fan-out, announcement, vLLM's interface."""

import inspect
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from trinity_core.errors import TransientFault
from trinity_core.sync.digest import value_digest
from trinity_core.sync.memory import MemoryVersions
from trinity_core.sync.nccl_transfer import EngineGroup, NcclSender, VllmWeights
from trinity_core.sync.tensorfile import TensorSpec, spec_of
from trinity_core.sync.weight_check import WeightCheck


class Recorder:
    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append(("init", init_info))

    def start_weight_update(self):
        self.calls.append(("start", None))

    def update_weights(self, update_info):
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version=None):
        self.calls.append(("finish", weight_version))


class Broken(Recorder):
    def update_weights(self, update_info):
        raise RuntimeError("engine died")


def test_each_engine_has_its_own_ranks():
    engines = [Recorder() for _ in range(3)]
    group = EngineGroup(engines, workers=2)
    assert group.world_size == 7
    group.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    assert [engine.calls[0][1]["rank_offset"] for engine in engines] == [1, 3, 5]
    group.start_weight_update()
    group.update_weights({"names": []})
    group.finish_weight_update("4")
    assert all([name for name, _ in engine.calls] == ["init", "start", "update", "finish"] for engine in engines)


def test_error_of_one_engine_is_raised():
    with pytest.raises(RuntimeError, match="engine died"):
        EngineGroup([Recorder(), Broken()], 1).update_weights({})
    with pytest.raises(ValueError, match="0 engines"):
        EngineGroup([], 1)


def test_a_lost_engine_is_noticed_beside_others_that_wait():
    """Those that are left wait in NCCL for a broadcast that never ends."""
    never, aborted = threading.Event(), []

    class Waiting(Recorder):
        def update_weights(self, update_info):
            never.wait()

    group = EngineGroup([Waiting(), Broken()], 1)
    group.abort = lambda: aborted.append(True)
    with pytest.raises(RuntimeError, match="engine died"):
        group.update_weights({})
    assert aborted == [True]
    never.set()


def test_version_without_tensors_is_announced(tmp_path):
    folder = MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    check = WeightCheck((1, 2), (-1.0,))
    folder.publish(3, [], check)
    assert folder.latest() == 3
    assert folder.check(3) == check
    assert dict(folder.load(3)) == {}


class Weights:
    gathers = False

    def __init__(self, tensors):
        self.tensors = tensors

    def specs(self):
        return [spec_of(name, tensor) for name, tensor in self.tensors]

    def __iter__(self):
        return iter(self.tensors)


@pytest.mark.slow
def test_sender_matches_vllms_interface(monkeypatch, tmp_path):
    from vllm.distributed.weight_transfer import nccl_engine

    class Group:
        sent = 0

        def destroy(self):
            pass

    tensors = [("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))]
    source = VllmWeights(Weights(tensors), engine_dtype="bfloat16", copies=True)
    assert [(m.name, m.dtype, m.shape) for m in source.metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in tensors]
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: Group())
    sent = []
    monkeypatch.setattr(
        nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.extend(name for name, _ in iterator)
    )
    engine, folder = Recorder(), MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    sender = NcclSender(0, source, EngineGroup([engine], 1), folder)
    sender.copy()
    sender.send(5)
    assert sent == ["a", "b"]
    assert folder.latest() == 5
    assert folder.values(5, "bfloat16") == {name: value_digest(tensor, "bfloat16") for name, tensor in tensors}
    assert engine.calls[2][1]["dtype_names"] == ["float32", "bfloat16"]
    assert "client" in inspect.signature(nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init).parameters
    tensors[0][1].fill_(2)
    sender.send(6, kept=dict(folder.load(5)))
    assert sent == ["a", "b", "a", "b"] and dict(folder.load(6))["a"].unique().tolist() == [1], "older weights again"
    sender.close()
    assert TensorSpec("a", "float32", (2, 3)) == spec_of("a", tensors[0][1])


class Gloo:
    """In place of vLLM's communicator: the same broadcast over gloo, and `destroy` ends one that waits."""

    def __init__(self, store, rank):
        self.group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        self.ended = threading.Event()

    def broadcast(self, tensor, src, stream=None):
        work = self.group.broadcast([tensor], torch.distributed.BroadcastOptions())
        while not work.is_completed():
            if self.ended.wait(0.01):
                return
        work.wait()

    def destroy(self):
        self.ended.set()


@pytest.fixture
def transfer(monkeypatch, tmp_path):
    """vLLM's own sender and receiver, which meet over gloo: `(sender, receiver, received)`."""
    from vllm.distributed.weight_transfer import nccl_engine

    store = torch.distributed.FileStore(str(tmp_path / "meet"), 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    info = nccl_engine.NCCLTrainerInitInfo
    monkeypatch.setattr(nccl_engine, "NCCLTrainerInitInfo", lambda *args, **kwargs: info(*args, **kwargs, packed=False))
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: Gloo(store, 0))
    received = {}
    receiver = object.__new__(nccl_engine.NCCLWeightTransferEngine)
    receiver.packed, receiver.device = False, torch.device("cpu")
    receiver.model = SimpleNamespace(load_weights=lambda pairs: received.update((n, t.clone()) for n, t in pairs))

    class Engine(Recorder):
        dies = False

        def init_weight_transfer_engine(self, init_info):
            receiver.model_update_group = Gloo(store, 1)

        def update_weights(self, update_info):
            if self.dies:
                raise TransientFault("the engine is gone")
            receiver.receive_weights(nccl_engine.NCCLWeightTransferUpdateInfo(**update_info))

    engine = Engine()
    tensors = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
    versions = MemoryVersions(tmp_path / "shm", spill=tmp_path / "spill")
    sender = NcclSender(0, VllmWeights(Weights(tensors)), EngineGroup([engine], 1), versions)
    return sender, engine, dict(tensors), received


@pytest.mark.slow
def test_weights_arrive_by_vllms_own_classes(transfer):
    sender, engine, tensors, received = transfer
    sender.send(1)
    assert received.keys() == tensors.keys() and all(torch.equal(received[name], tensors[name]) for name in tensors)
    assert [name for name, _ in engine.calls] == ["start", "finish"]


@pytest.mark.slow
def test_an_engine_that_dies_during_a_push_ends_it(transfer):
    sender, engine, _, _ = transfer
    engine.dies = True
    began = time.monotonic()
    with pytest.raises(TransientFault, match="the engine is gone"):
        sender.send(1)
    assert time.monotonic() - began < 20
