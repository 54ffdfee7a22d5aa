"""With a GPU shared with an engine, states move to host memory and back without loss."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from saving_helpers import save

from trinity_core.config.training import GPU_CONTEXT
from trinity_core.exchange.pinned import HostBuffer
from trinity_core.training.checkpoint import load
from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.engine import fits_beside_engine
from trinity_core.training.learner import Learner
from trinity_core.training.state import optimizer_state, weights

pytestmark = pytest.mark.slow

OPTIMIZER_OFFLOAD = {"trainer__trainer_config__actor_rollout_ref__actor__fsdp_config__optimizer_offload": True}


@pytest.mark.parametrize(
    ("device", "beyond", "overrides", "fits"),
    [
        ("cuda", 0, {}, True),
        ("cuda", 1, {}, False),
        ("cuda", 0, {"explorer__rollout_model__kv_cache_gib": 1.0}, False),
        ("cpu", 0, {}, False),
    ],
)
def test_states_stay_where_the_engines_leave_them_room(make_config, monkeypatch, device, beyond, overrides, fits):
    """Of 24 GiB the engines take three quarters; the trainer has reserved the rest and `beyond` more bytes."""
    reserved = (6 << 30) - GPU_CONTEXT + beyond
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 24 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    config = make_config(**{"explorer__rollout_model__gpu_memory_utilization": 0.75}, **overrides)
    assert fits_beside_engine(config, torch.device(device)) is fits


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"trainer__zero_stage": 2, "trainer__dtype": "bfloat16", **OPTIMIZER_OFFLOAD},
        {"algorithm": "ppo"},
    ],
)
def test_steps_between_moves_are_the_same_steps(make_config, tmp_path, overrides):
    """Moved before and after the first step, and saved while offloaded: bit-identical."""
    ranks = join(0, 1, *meeting_point(), use_gpu=False)

    def learner():
        torch.manual_seed(0)
        return Learner(make_config(**overrides), 4, ranks)

    def state(of):
        return {name: tensor.clone() for name, tensor in (*weights(of.engine), *optimizer_state(of.engine))}

    plain, moved = learner(), learner()
    for step in (1, 2):
        moved.offload()
        if step == 2:
            (tmp_path / "saved").mkdir()
            save(moved, 1, tmp_path / "saved")
        moved.reload()
        batch = make_batch(step)
        here, there = plain.step(batch, step), moved.step(batch, step)
        for name in here:
            assert name.startswith("timing_s/") or here[name] == there[name], name
    before, after = state(plain), state(moved)
    assert before.keys() == after.keys() and any(name.startswith("exp_avg") for name in before)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name

    resumed = learner()
    assert load(resumed, tmp_path / "saved").step == 1
    resumed.step(make_batch(2), 2)
    for name, tensor in state(resumed).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    "overrides", [{"trainer__dtype": "bfloat16"}, {"model__lora_configs": "[{name: a, lora_rank: 4}]"}]
)
def test_steps_go_on_from_the_hosts_buffer(make_config, overrides):
    """The copies that a GPU's trainer makes, here from the host to the host: bit-identical steps."""
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    learners = []
    for _ in range(2):
        torch.manual_seed(0)
        learners.append(Learner(make_config(trainer__zero_stage=0, **overrides), 4, ranks))
    plain, moved = learners
    for step in (1, 2, 3):
        moved.engine._take_to_host()
        moved.engine.reload()
        assert (
            plain.step(make_batch(step), step)["actor/grad_norm"]
            == moved.step(make_batch(step), step)["actor/grad_norm"]
        )
    for (name, tensor), (_, other) in zip(weights(plain.engine), weights(moved.engine), strict=True):
        assert torch.equal(tensor, other), name


def test_a_host_buffer_holds_every_tensor_and_is_made_once():
    tensors = [torch.arange(5), torch.rand(3, 7), torch.rand(2, 2).bfloat16().t(), torch.tensor(1.5), torch.empty(0)]
    buffer = HostBuffer()
    copies = buffer.copies(tensors)
    assert all(
        torch.equal(copy, tensor) and copy.dtype == tensor.dtype for copy, tensor in zip(copies, tensors, strict=True)
    )
    place = copies[0].data_ptr()
    assert buffer.copies([tensor + 1 for tensor in tensors[:2]])[0].data_ptr() == place
    assert torch.equal(copies[0], tensors[0] + 1), "the copies of a later call replace those of an earlier one"
    grown = buffer.copies([torch.full((10_000,), 2.0), torch.full((10_000,), 3.0)])
    assert [float(copy.min()) for copy in grown] == [float(copy.max()) for copy in grown] == [2.0, 3.0]
