"""The sync method `nccl` as far as it runs without a GPU: ranks, fan-out, announcement, vLLM's interface."""

import asyncio
import threading
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from trinity_core.base.errors import TransientFault
from trinity_core.exchange.sync import nccl
from trinity_core.exchange.sync.nccl import EngineGroup, NcclSender, PushedVersions, VllmWeights
from trinity_core.exchange.sync.tensorfile import spec_of
from trinity_core.rollout.inference.async_llm import AsyncLLMEngine
from trinity_core.rollout.inference.requests import WeightSource
from trinity_core.rollout.inference.weight_receiver import digests_before_packing, with_head


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


def test_a_lost_engine_is_noticed_beside_others_that_wait():
    """Those that are left wait in NCCL for a broadcast that never ends."""
    never, aborted = threading.Event(), []

    class Waiting(Recorder):
        def update_weights(self, update_info):
            never.wait()

    group = EngineGroup([Waiting(), Broken()], 1)
    group.abort = lambda: aborted.append(True)
    with pytest.raises(RuntimeError):
        group.update_weights({})
    assert aborted == [True]
    never.set()


class Weights:
    gathers = False

    def __init__(self, tensors):
        self.tensors = tensors

    def specs(self):
        return [spec_of(name, tensor) for name, tensor in self.tensors]

    def __iter__(self):
        return iter(self.tensors)


class Gloo:
    """In place of vLLM's communicator: the same broadcast over gloo, and `destroy` ends one that waits."""

    def __init__(self, store, rank):
        self.group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        self.count, self.begun, self.ended = 0, threading.Event(), threading.Event()

    def broadcast(self, tensor, src, stream=None):
        self.count += 1
        self.begun.set()
        work = self.group.broadcast([tensor], torch.distributed.BroadcastOptions())
        while not work.is_completed():
            if self.ended.wait(0.01):
                return
        work.wait()

    def destroy(self):
        self.ended.set()


class OnCpu:
    """An `AsyncLLM` whose worker is that of an engine in this process, which samples nothing meanwhile."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, verb):
        from vllm.v1.engine.async_llm import AsyncLLM

        return partial(getattr(AsyncLLM, verb), self)

    async def collective_rpc(self, method, args=(), kwargs=None):
        return await self._engine._call(lambda: self._engine._vllm.collective_rpc(method, args=args, kwargs=kwargs))

    async def _nothing(self, *_, **__): ...

    pause_generation = resume_generation = reset_prefix_cache = update_weight_version = _nothing


class Blocking:
    """A `RayEngine` of an engine, without Ray's calls."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, verb):
        return lambda *arguments: asyncio.run(getattr(self.engine, verb)(*arguments))


@pytest.fixture
def push(monkeypatch, tmp_path, tiny_engine, tiny_folder, tiny_model):
    """Push other weights through our classes and vLLM's into a worker of vLLM on the CPU; that engine, the model as
    pushed, and the trainer's side of the group. Streams are CUDA's."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, nccl_engine, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: [stream] * number)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(nccl, "BUFFER_BYTES", 1 << 18)
    store, sides = torch.distributed.FileStore(str(tmp_path / "meet"), 2), {}

    def meet(rank):
        return sides.setdefault(rank, Gloo(store, rank))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: meet(0))
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, parallel: meet(info.rank_offset))

    def receive(wrapper):
        worker = wrapper.worker
        made = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="nccl"), worker.vllm_config, worker.device, worker.get_model()
        )
        monkeypatch.setattr(worker, "weight_transfer_engine", made)

    engine, trained = AsyncLLMEngine(tiny_engine.settings), deepcopy(tiny_model)
    engine._engine = OnCpu(tiny_engine)
    asyncio.run(engine._vllm.collective_rpc(receive))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    tensors = list(with_head(iter(trained.state_dict().items())))
    source = VllmWeights(Weights(tensors), "float32")
    sender = NcclSender(0, source, EngineGroup([Blocking(engine)], 1), PushedVersions.open(tmp_path))

    def push(version):
        with digests_before_packing("float32"):
            sender.send(version)

    yield push, engine, trained, sides
    asyncio.run(tiny_engine.load(WeightSource("folder", str(tiny_folder)), 0))


@pytest.mark.slow
def test_pushed_weights_are_in_use(push, tmp_path, tiny_engine):
    """Parameters are those published, and so are log-probs; in several buffers."""
    push, engine, trained, sides = push
    push(1)
    asyncio.run(engine.load(WeightSource("nccl", str(tmp_path)), 1))
    assert engine.version == 1 and sides[0].count == sides[1].count > 2
    tokens = [5, 9, 12, 40, 7]
    with torch.no_grad():
        logprobs = trained(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert asyncio.run(tiny_engine.score(tokens)) == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_an_engine_that_is_lost_during_a_push_ends_it(push, monkeypatch):
    """The trainer's broadcast, in which it waits for the engine, is aborted."""
    push, engine, _, sides = push

    def gone(*_):
        assert sides[0].begun.wait(60)
        raise TransientFault("the engine is gone")

    monkeypatch.setattr(Blocking, "start_weight_update", lambda *_: None, raising=False)
    monkeypatch.setattr(Blocking, "update_weights", gone, raising=False)
    with pytest.raises(TransientFault):
        push(1)
    assert engine.version == 0 and sides[0].ended.is_set()
