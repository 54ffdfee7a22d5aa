"""Peaks of memory, against numbers worked out by hand and against what autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from preflight_configs import SHAPE, config_of
from raising import raising

from trinity_core.algorithms.logprobs import KERNEL_SLICE
from trinity_core.base.errors import TrinityError
from trinity_core.config import LoraConfig, train_settings
from trinity_core.config.training import MAX_LIVE, REDUCE_BUCKET, zero_stage_of
from trinity_core.data.experience import Experience
from trinity_core.data.tiny import TinySize, make_model
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.run.preflight.memory import (
    PIECE,
    MicroBatch,
    TrainedModel,
    activation_bytes,
    cpu_engine_needs,
    gpu_engine_needs,
    layer_bytes,
    logit_bytes,
    micro_batch_of,
)
from trinity_core.run.preflight.model_shape import adapter_parameters, shape_of
from trinity_core.training import packing
from trinity_core.training.batching import LARGEST_MASK, mask_elements, pairs_of, plan, units_of
from trinity_core.training.lora import add_adapter
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm

MILLION = 1_000_000
MICRO = MicroBatch(count=1, tokens=100, targets=64, rows=4, longest=40, mask=0)
"""Of a model so small that its state outweighs a pass."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, 0, TinySize(128, 384, 3, 4, 2))
    return folder


@pytest.mark.parametrize(("dtype", "on_gpu"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_keeps(model, dtype, checkpointing, on_gpu, monkeypatch):
    if on_gpu:
        masked = packing.masked_attention
        monkeypatch.setattr(packing, "masked_attention", lambda *inputs, **_: masked(*inputs, repeat_heads=True))
    lm = load_causal_lm(str(model), dtype)
    fast_paths = find_fast_paths(lm)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(lm, fast_paths)
    prompts, repeats, prompt, response = 4, 4, 32, 32
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        begin = rng.integers(0, 400, prompt)
        for _ in range(repeats):
            tokens = np.concatenate([begin, rng.integers(0, 400, response)])
            rows.append(Experience(tokens=tokens, prompt_length=prompt, action_mask=np.ones(response)))
    micro = build_micro(rows, range(len(rows)), response).to(torch.device("cpu"))
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor.shape, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(micro, 1.0, False)
    shape = shape_of(str(model))
    layers = sum(count for count, size, _ in kept.values() if size[-1:] != (shape.vocabulary,))
    number = len(rows)
    counted = MicroBatch(1, prompts * prompt + number * response, number * response, number, prompt + response, 0)
    estimate = activation_bytes(shape, counted, dtype.itemsize, checkpointing, on_gpu)
    if checkpointing:  # the layer that is computed again is kept in the backward pass only
        estimate -= layer_bytes(shape, counted, dtype.itemsize, on_gpu)
    assert estimate == pytest.approx(layers, rel=0.03)


def test_logits_are_held_four_times_or_sliced():
    assert logit_bytes(SHAPE, MICRO) == 4 * 4 * 64 * 1024
    large = MicroBatch(1, 1, 1 << 15, 1, 1, 0)
    assert logit_bytes(SHAPE, large) == 3 * 4 * (1 << 23)
    assert logit_bytes(SHAPE, large, on_gpu=True) == 4 * KERNEL_SLICE, "in float32"


def test_micro_batches_are_those_of_the_trainer():
    def planned(*overrides):
        config = config_of("trainer.max_token_len_per_gpu=800", *overrides)
        return micro_batch_of(config, train_settings(config), 1)

    # A group: 88 tokens of the prompt and 8 responses of 40, 408; with shorter ones the budget is filled.
    micro = planned()
    assert (micro.count, micro.tokens, micro.targets, micro.longest, micro.mask) == (3, 800, 800, 128, 32 * 40 * 128)
    micro = planned("trainer.max_token_len_per_gpu=100000")
    assert (micro.count, micro.tokens, micro.rows) == (1, 4 * 408, 32), "all of them"
    micro = planned(
        "trainer.use_dynamic_bsz=false",
        "trainer.trainer_config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    )
    assert (micro.count, micro.tokens, micro.rows) == (2, 816, 16)
    # Each of the 32 answers after its teacher's own prompt of up to 160 tokens.
    micro = planned(
        "trainer.max_token_len_per_gpu=100000", "algorithm.algorithm_type=opsd_full", "model.max_model_len=200"
    )
    assert (micro.tokens, micro.longest, micro.targets) == (32 * 200, 200, 32 * 40)


@given(
    st.lists(st.tuples(st.integers(1, 88), st.tuples(*[st.integers(1, 40)] * 8)), min_size=4, max_size=4),
    st.integers(100, 2000), st.sampled_from([1, 2, 4]), st.sampled_from(["grpo", "dpo"]),
)  # fmt: skip
def test_no_micro_batch_is_larger_than_planned(groups, budget, workers, algorithm):
    """Any lengths within the limits (88 and 40 tokens, 4 groups of 8), packed as the trainer packs them."""
    config = config_of(f"trainer.max_token_len_per_gpu={budget}")
    config = config.with_values({"algorithm.algorithm_type": algorithm})
    bound = micro_batch_of(config, train_settings(config), workers)
    prompts, responses = [prompt for prompt, _ in groups for _ in range(8)], [one for _, many in groups for one in many]
    if algorithm == "dpo":
        units = pairs_of(prompts, responses)
    else:
        units = units_of([row // 8 for row in range(32)], prompts, responses, budget, LARGEST_MASK)
    of_row = {row: unit for unit in units for row in unit.rows}
    for micro in (micro for share in plan(units, budget, workers, LARGEST_MASK) for micro in share if micro):
        joined, *others = dict.fromkeys(of_row[row] for row in micro)
        for unit in others:
            joined = joined.with_(unit)
        assert joined.cost(LARGEST_MASK) <= bound.tokens and sum(responses[row] for row in micro) <= bound.targets
        assert mask_elements(len(micro), joined.prompt, joined.response) <= bound.mask


def test_workers_share_the_tokens_of_a_sequence():
    config = config_of(
        "trainer.max_token_len_per_gpu=408", "trainer.ulysses_sequence_parallel_size=2", "trainer.worker_num=2"
    )
    part = micro_batch_of(config, train_settings(config), 2)
    assert (part.tokens, part.targets) == (408, 408), "of twice the budget, half"


def state(stage: int, workers: int, width: int = 4, **more) -> TrainedModel:
    return TrainedModel("policy", SHAPE, width, stage, workers, MICRO, **more)


@pytest.mark.parametrize(
    ("stage", "workers", "width", "weights", "optimizer", "copy"),
    [  # bytes per parameter
        (0, 1, 4, 4, 8, 12),
        (0, 1, 2, 2, 12, 14),  # with float32 weights
        (2, 2, 2, 2, 12 / 2, 14 / 2),
        (3, 4, 2, 2 / 4, 12 / 4, 14 / 4),
        (3, 4, 4, 4 / 4, 8 / 4, 12 / 4),  # float32 weights are updated in place
    ],
)
def test_trainer_holds_weights_optimizer_and_a_copy(stage, workers, width, weights, optimizer, copy):
    held = state(stage, workers, width)
    assert held.weights().bytes == weights * MILLION and held.optimizer().bytes == optimizer * MILLION
    assert held.copy().bytes == copy * MILLION and held.copy().spared


def test_gradients_on_a_gpu_are_bounded_by_the_bucket():
    """Forty buckets of parameters on four workers, in bfloat16 (`stage_1_and_2.py`, `stage3.py`)."""
    large = replace(SHAPE, parameters=40 * REDUCE_BUCKET, vocabulary=1 << 20)

    def peak(stage: int, **more) -> int:
        return TrainedModel("policy", large, 2, stage, 4, MICRO, on_gpu=True, **more).peak().bytes

    passing = activation_bytes(large, MICRO, 2, False, True) + logit_bytes(large, MICRO, on_gpu=True)
    part, reduced = 10 * REDUCE_BUCKET, (4 + 2) * large.embedding  # which is larger than the bucket
    assert large.embedding > REDUCE_BUCKET
    assert peak(2) == max(passing + 4 * part, 2 * 4 * part) + reduced
    gathered = 2 * (MAX_LIVE + large.embedding)  # ahead, and the largest tensor
    assert peak(3) == passing + 4 * part + reduced + gathered
    assert peak(2, optimizer_offload=True) == passing + 4 * part + reduced, "ZeRO 2 keeps them on the GPU"
    assert peak(3, optimizer_offload=True) == passing + reduced + gathered


def test_offloaded_state_is_on_the_host():
    large = replace(SHAPE, parameters=40 * REDUCE_BUCKET)
    part = 10 * REDUCE_BUCKET
    model = TrainedModel("policy", large, 2, 3, 4, MICRO, on_gpu=True, optimizer_offload=True)
    assert model.optimizer().bytes == 0 and model.weights().bytes == 2 * part
    assert model.on_host(colocated=False).bytes == 18 * part + PIECE, "optimizer state is saved in pieces"
    assert model.on_host(colocated=True).bytes == 20 * part + PIECE, "the weights leave the GPU in turn"
    model = replace(model, param_offload=True)
    assert model.weights().bytes == 0 and model.on_host(colocated=True).bytes == 20 * part + PIECE


def test_adapter_counts_its_own_parameters(model):
    """As peft makes them; the base has weights alone, a quarter as large in 4 bits."""
    lora, some = LoraConfig(lora_rank=4), LoraConfig(lora_rank=4, target_modules=["q_proj", "down_proj"])
    shape = shape_of(str(model))
    for chosen in (lora, some):
        lm = load_causal_lm(str(model), torch.float32)
        add_adapter(lm, chosen, "base", 0, dropout=False)
        assert adapter_parameters(shape, chosen) == sum(p.numel() for p in lm.parameters() if p.requires_grad)
    policy = TrainedModel("policy", shape, 4, 2, 2, MICRO, lora=lora)
    count = adapter_parameters(shape, lora)
    assert policy.weights().bytes == 4 * (shape.parameters + count)
    assert policy.optimizer().bytes == 12 * (count // 2)
    large = replace(SHAPE, parameters=8_000_000_000, vocabulary=1000)
    four = TrainedModel("policy", large, 2, 2, 1, MICRO, lora=LoraConfig(load_in_4bit=True))
    assert four.weights().bytes == pytest.approx(0.52 * 8e9, rel=0.01)
    engine = EngineSettings("x", 128, on_gpu=True, lora_rank=4, kv_cache_gib=1)
    needs = {need.what: need.bytes for need in gpu_engine_needs(engine, 1, shape, lora)[0]}
    assert needs["weights"] == 2 * (shape.parameters + 2 * count), "once in the kernels' tensors, once as loaded"


@pytest.mark.parametrize(
    ("asked", "workers", "dtype", "offloads", "stage"),
    [
        (None, 1, "float32", False, 0),
        (None, 2, "float32", False, 0),
        (1, 1, "float32", True, 2),
        (2, 1, "bfloat16", False, 0),
        (None, 1, "bfloat16", True, 2),
        (0, 2, "bfloat16", False, 0),
        (0, 2, "bfloat16", True, 2),
        (1, 2, "bfloat16", False, 0),
        (2, 2, "bfloat16", False, 2),
        (0, 1, "float16", False, 2),
        (3, 1, "bfloat16", False, 3),
    ],
)
def test_zero_stage_in_force(asked, workers, dtype, offloads, stage):
    assert zero_stage_of(asked, workers, dtype, offloads) == stage


def test_engine_holds_weights_cache_and_logits():
    settings = EngineSettings("model", max_model_len=128, max_num_seqs=32)
    needs = {need.what: need.bytes for need in cpu_engine_needs(settings, SHAPE, (8, 88), 2, 1 << 34)}
    assert needs["weights"] == 4 * (MILLION + 1024 * 128)  # the tied head has a packed copy
    assert needs["KV cache"] == (32 * 128 + 32) * 2 * 4 * 2 * 32 * 4  # tokens × keys and values of 4 layers, 2 heads
    assert needs["loading weights"] == 2 * MILLION + needs["weights"]
    assert needs["largest pass"] == 8 * 88 * 3 * (128 + 384) * 4 + 6 * 4 * 32 * 1024
    with raising(TrinityError, key="model.max_model_len"):
        cpu_engine_needs(settings, SHAPE, (8, 88), 2, 1 << 18)
    (share,), _ = gpu_engine_needs(EngineSettings("model", 128, gpu_memory_utilization=0.5), 80 << 30)
    assert share.bytes == 40 << 30
