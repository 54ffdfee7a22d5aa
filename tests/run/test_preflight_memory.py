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
from trinity_core.config.training import AT_ONCE_ON_CPU, MAX_LIVE, REDUCE_BUCKET, zero_stage_of
from trinity_core.data.experience import Experience
from trinity_core.data.tiny import TinySize, make_model
from trinity_core.rollout.inference.settings import EngineSettings
from trinity_core.run.preflight.model_shape import ModelShape, Need, adapter_parameters, shape_of, total
from trinity_core.run.preflight.resource_estimate import (
    cpu_engine_needs,
    gpu_engine_needs,
    prefill_tokens,
)
from trinity_core.run.preflight.trainer_memory import (
    PIECE,
    MicroBatches,
    TrainedModel,
    activation_bytes,
    layer_bytes,
    logit_bytes,
    shared_micro_batches,
    trainer_needs,
    worst_micro_batches,
)
from trinity_core.training import packing
from trinity_core.training.batching import LARGEST_MASK, mask_elements, pairs_of, plan, units_of
from trinity_core.training.lora import add_adapter
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm

BASE = Need("process", 0, "")
MILLION = 1_000_000
MICRO = MicroBatches(count=1, tokens=100, targets=64, rows=4, longest=40, mask=0)
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
    counted = MicroBatches(1, prompts * prompt + number * response, number * response, number, prompt + response, 0)
    estimate = activation_bytes(shape, counted, dtype.itemsize, checkpointing, on_gpu)
    if checkpointing:  # the layer that is computed again is kept in the backward pass only
        estimate -= layer_bytes(shape, counted, dtype.itemsize, on_gpu)
    assert estimate == pytest.approx(layers, rel=0.03)


def test_logits_are_held_four_times_or_sliced():
    assert logit_bytes(SHAPE, MICRO) == 4 * 4 * 64 * 1024
    large = MicroBatches(1, 1, 1 << 15, 1, 1, 0)
    assert logit_bytes(SHAPE, large) == 3 * 4 * (1 << 23)
    assert logit_bytes(SHAPE, large, on_gpu=True) == 4 * KERNEL_SLICE, "in float32"


def test_micro_batches_are_those_of_the_trainer():
    def planned(*overrides):
        config = config_of("trainer.max_token_len_per_gpu=800", *overrides)
        return worst_micro_batches(config, train_settings(config), 1)

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
    bound = worst_micro_batches(config, train_settings(config), workers)
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
    config = config_of("trainer.max_token_len_per_gpu=408", "trainer.ulysses_sequence_parallel_size=2")
    settings = train_settings(config)
    whole, part = worst_micro_batches(config, settings, 1), shared_micro_batches(config, settings, 2, 2)
    assert (whole.tokens, part.tokens, part.targets) == (408, 408, 408), "of twice the budget, half"
    assert shared_micro_batches(config, settings, 1, 1) == whole


def state(stage: int, workers: int, width: int = 4, **more) -> dict[str, int]:
    policy = TrainedModel("policy", SHAPE, width, stage, workers, MICRO, checkpointing=False, **more)
    return {need.what: need.bytes for need in trainer_needs(BASE, policy, None, None, 0)}


def test_trainer_holds_weights_optimizer_and_gradients():
    whole = state(0, 1)
    assert whole["policy weights"] == 4 * MILLION
    assert whole["policy optimizer"] == 8 * MILLION
    assert state(0, 1, width=2)["policy optimizer"] == 12 * MILLION, "with float32 weights"
    alone, two = (TrainedModel("policy", SHAPE, 4, 0, workers, MICRO, checkpointing=False) for workers in (1, 2))
    assert alone.update().bytes == 4 * MILLION
    assert two.update().bytes == 8 * MILLION, "one bucket holds them all"
    halves = state(2, 2, width=2)
    assert halves["policy weights"] == 2 * MILLION
    assert halves["policy optimizer"] == 12 * MILLION // 2
    split = state(3, 4, width=2)
    assert split["policy weights"] == 2 * MILLION // 4
    assert split["policy optimizer"] == 12 * MILLION // 4
    assert split["policy buffers of gradients"] == 4 * MILLION // 4 + 2 * AT_ONCE_ON_CPU
    assert state(3, 4)["policy optimizer"] == 8 * MILLION // 4, "float32 weights are updated in place"
    elsewhere = state(3, 4, on_gpu=True, weights_offloaded=True)
    assert elsewhere["policy optimizer"] == 12 * MILLION // 4, "but not from another device"
    copied = "policy copy for checkpoints"
    assert (whole[copied], halves[copied], split[copied]) == (12 * MILLION, 14 * MILLION // 2, 14 * MILLION // 4)


def test_gradients_on_a_gpu_are_bounded_by_the_bucket():
    """Forty buckets of parameters on four workers, in bfloat16 (`stage_1_and_2.py`, `stage3.py`)."""
    large = replace(SHAPE, parameters=40 * REDUCE_BUCKET, vocabulary=1 << 20)

    def passes(stage: int, shape: ModelShape = large) -> tuple[TrainedModel, int]:
        model = TrainedModel("policy", shape, 2, stage, 4, MICRO, checkpointing=False, on_gpu=True)
        activations = activation_bytes(shape, MICRO, 2, False) + logit_bytes(shape, MICRO, on_gpu=True)
        return model, model.passes().bytes - activations

    part = 10 * REDUCE_BUCKET
    zero2, gradients = passes(2)
    beside = (4 + 2) * large.embedding  # which is larger than the bucket: its gradient, and that in float32
    assert large.embedding > REDUCE_BUCKET and gradients == 4 * part + 2 * REDUCE_BUCKET + beside
    assert zero2.update().bytes == 2 * REDUCE_BUCKET + 2 * 4 * part
    zero3, gradients = passes(3)
    gathered = MAX_LIVE + large.embedding  # ahead, and the largest tensor
    assert gradients == beside + 2 * gathered
    small, gradients = passes(3, shape=replace(large, vocabulary=1024))
    assert gradients == 4 * REDUCE_BUCKET + 2 * (MAX_LIVE + small.shape.embedding)
    assert zero3.kept_gradients().bytes == 4 * part + 2 * REDUCE_BUCKET


def test_offloaded_optimizer_leaves_gradients_on_the_gpu_under_zero_2_alone():
    large = replace(SHAPE, parameters=40 * REDUCE_BUCKET)
    part = 10 * REDUCE_BUCKET
    for stage, kept in ((2, 4 * part), (3, 0)):
        model = TrainedModel("policy", large, 2, stage, 4, MICRO, checkpointing=False, on_gpu=True, offloaded=True)
        assert model.optimizer().bytes == 0
        assert model.update().bytes + model.kept_gradients().bytes == 2 * REDUCE_BUCKET + kept
        assert model.on_host().bytes == 18 * part + PIECE, "optimizer state is saved in pieces"
        weights = replace(model, weights_offloaded=True)
        assert weights.weights().bytes == (0 if stage == 3 else 2 * 40 * REDUCE_BUCKET)


def test_trainer_adds_critic_reference_and_published_weights():
    policy = TrainedModel("policy", SHAPE, 4, 0, 1, MICRO, checkpointing=False)
    critic = TrainedModel("critic", SHAPE, 4, 0, 1, MICRO, checkpointing=False, scores=False)
    alone = total(trainer_needs(BASE, policy, None, None, 0))
    assert total(trainer_needs(BASE, policy, critic, None, 0)) == alone + 24 * MILLION
    assert total(trainer_needs(BASE, policy, None, policy, 3)) == alone + 4 * MILLION + 3 * 4 * MILLION


def test_adapter_counts_its_own_parameters(model):
    """As peft makes them; the base has weights alone, of which there is one copy, a quarter as large in 4 bits."""
    lora, some = LoraConfig(lora_rank=4), LoraConfig(lora_rank=4, target_modules=["q_proj", "down_proj"])
    shape = shape_of(str(model))
    for chosen in (lora, some):
        lm = load_causal_lm(str(model), torch.float32)
        add_adapter(lm, chosen, "base", 0, dropout=False)
        assert adapter_parameters(shape, chosen) == sum(p.numel() for p in lm.parameters() if p.requires_grad)
    policy = TrainedModel("policy", shape, 4, 2, 2, MICRO, checkpointing=False, lora=lora)
    count = adapter_parameters(shape, lora)
    assert policy.weights().bytes == 4 * (shape.parameters + count)
    assert policy.optimizer().bytes == 12 * (count // 2)
    assert policy.update().bytes == 4 * count + 2 * 4 * (count // 2)
    assert policy.published == 4 * count
    large = replace(SHAPE, parameters=8_000_000_000, vocabulary=1000)
    four = TrainedModel("policy", large, 2, 2, 1, MICRO, checkpointing=False, lora=LoraConfig(load_in_4bit=True))
    assert four.weights().bytes == pytest.approx(0.52 * 8e9, rel=0.01)
    engine = EngineSettings("x", 128, on_gpu=True, lora_rank=4)
    needs = {need.what: need.bytes for need in gpu_engine_needs(replace(engine, kv_cache_gib=1), 1, shape, lora)}
    assert needs["adapter"] == 2 * 2 * count


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
    needs = {need.what: need.bytes for need in cpu_engine_needs(BASE, settings, SHAPE, 8, 88, 2, 1 << 34)}
    assert needs["weights"] == 4 * (MILLION + 1024 * 128)  # the tied head has a packed copy
    assert needs["KV cache"] == (32 * 128 + 32) * 2 * 4 * 2 * 32 * 4  # tokens × keys and values of 4 layers, 2 heads
    assert needs["loading weights"] == 2 * MILLION + needs["weights"]
    assert prefill_tokens(32, 8, 88) == 8 * 88 + 24 * 32
    assert needs["prefill"] == (8 * 88 + 24 * 32) * 3 * (128 + 384) * 4
    assert needs["sampler"] == 6 * 4 * 32 * 1024
    with raising(TrinityError, key="model.max_model_len"):
        cpu_engine_needs(BASE, settings, SHAPE, 8, 88, 2, 1 << 18)
    (share,) = gpu_engine_needs(EngineSettings("model", 128, gpu_memory_utilization=0.5), 80 << 30)
    assert share.bytes == 40 << 30
