"""An engine with a LoRA adapter: its samples, and the weight check of adapter and base."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from raising import raising
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.base.errors import DataError, TrinityError, WeightSyncError
from trinity_core.config import LoraConfig
from trinity_core.exchange.checkpoints.adapters import A, B, adapter_config, merged_tensor, write_adapter
from trinity_core.exchange.sync.tensorfile import TensorDigest, digest
from trinity_core.exchange.sync.versions import open_versions
from trinity_core.exchange.sync.weight_check import WeightCheck
from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.requests import Request, Sample, Sampling, WeightSource

pytestmark = pytest.mark.slow

RANK, SCALE = 6, 1.5
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj")


@pytest.fixture(scope="module")
def engine(engine_of: Any, tiny_folder: Path) -> InProcessEngine:
    names = (*TARGETS, "qkv_proj")  # which the model lacks
    return engine_of(str(tiny_folder), 256, max_num_seqs=64, lora_rank=RANK, lora_modules=names)


def adapter_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.endswith(TARGETS):
            out, into = module.weight.shape
            tensors[name + A] = torch.randn(RANK, into, generator=generator) / into**0.5
            tensors[name + B] = torch.randn(out, RANK, generator=generator) / RANK**0.5
    return tensors


def logprobs_of(tensors: dict[str, torch.Tensor], model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probs of tokens 1 … by transformers."""
    ids = torch.tensor(tokens)
    with torch.no_grad():
        logits = torch.func.functional_call(model, tensors, (ids[None],), tie_weights=True).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def merged(model: Any, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: merged_tensor(name, p, adapter, SCALE) for name, p in model.named_parameters()}


def base_digests(model: Any) -> dict[str, TensorDigest]:
    return {name: digest(p) for name, p in model.named_parameters(remove_duplicate=False)}


def publish(
    folder: Path, version: int, model: Any, adapter: dict[str, torch.Tensor], pushed: dict[str, TensorDigest]
) -> WeightSource:
    tokens = torch.randint(3, 400, (24,), generator=torch.Generator().manual_seed(5)).tolist()
    check = WeightCheck(tuple(tokens), tuple(logprobs_of(merged(model, adapter), model, tokens).tolist()))
    scaled = {name: tensor * SCALE if name.endswith(B) else tensor for name, tensor in adapter.items()}
    open_versions("checkpoint", folder).publish(version, scaled.items(), check, pushed=pushed)
    return WeightSource("checkpoint", str(folder))


def sample(engine: InProcessEngine, key: str) -> tuple[list[int], Sample]:
    prompt = np.arange(3, 70, dtype=np.int32)  # longer than a block, so that the prefix cache holds it
    [sequence] = asyncio.run(engine.generate([Request(key, prompt, Sampling(12), seed=7)])).unpack()
    return prompt.tolist(), sequence


def assert_sampled_by(weights: dict[str, torch.Tensor], model: Any, sampled: tuple[list[int], Sample]) -> None:
    prompt, sequence = sampled
    expected = logprobs_of(weights, model, [*prompt, *sequence.tokens.tolist()])[len(prompt) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-5)


def _computed_by(worker: Any) -> set[str]:
    """The names of the classes that compute the adapter's contribution."""
    modules = worker.model_runner.lora_manager._adapter_manager.modules
    return {type(module.punica_wrapper).__name__ for module in modules.values()}


def test_each_version_is_sampled_and_checked(engine: InProcessEngine, tiny_model: Any, tmp_path: Path) -> None:
    """From a published version and from peft's folder; the prompt is in the previous version's prefix cache."""
    assert engine._vllm.collective_rpc(_computed_by) == [{"OneAdapter"}]
    base = dict(tiny_model.named_parameters())
    assert_sampled_by(base, tiny_model, sample(engine, "start"))
    names = set()
    for version in (1, 2):
        adapter = adapter_of(tiny_model, version)
        source = publish(tmp_path, version, tiny_model, adapter, base_digests(tiny_model))
        report = asyncio.run(engine.load(source, version))
        assert report.gap is not None and report.gap < 1e-4
        assert engine._adapter is not None
        names.add(engine._adapter.lora_name)
        sampled = sample(engine, f"version {version}")
        assert_sampled_by(merged(tiny_model, adapter), tiny_model, sampled)
        assert set(sampled[1].versions.tolist()) == {version}
    assert len(names) == 2
    lora = LoraConfig(lora_rank=RANK, lora_alpha=RANK * SCALE, target_modules=TARGETS)
    first = adapter_of(tiny_model, 1)
    (tmp_path / "adapter").mkdir()
    write_adapter(first, adapter_config(lora, "base", TARGETS), tmp_path / "adapter")
    assert asyncio.run(engine.load(WeightSource("folder", str(tmp_path / "adapter")), 1)).gap is None
    assert_sampled_by(merged(tiny_model, first), tiny_model, sample(engine, "folder"))
    asyncio.run(engine.load(WeightSource("folder", engine.settings.model_path), 0))
    assert_sampled_by(base, tiny_model, sample(engine, "base"))


def test_an_engine_that_lacks_a_matrix_of_the_adapter_does_not_start(engine_of: Any, tmp_path: Path) -> None:
    """vLLM has GLM 4's `gate_up_proj`, but only takes adapters of its parts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model("glm4", **sizes, **heads, pad_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with raising(TrinityError, key="model.lora_configs[0].target_modules"):
        engine_of(str(tmp_path), 64, lora_rank=RANK, lora_modules=("q_proj", "gate_up_proj"))


def test_the_weight_check_sees_a_wrong_adapter_and_a_wrong_base(
    engine: InProcessEngine, tiny_model: Any, tmp_path: Path
) -> None:
    right, adapter = base_digests(tiny_model), adapter_of(tiny_model, 3)
    source = publish(tmp_path, 3, tiny_model, adapter, {})
    assert asyncio.run(engine.load(source, 3)).gap is not None, "a base that is not compared"
    name = "model.layers.0.self_attn.k_proj.weight"
    wrong = right | {name: right[name]._replace(values=right[name].values + 1)}
    with pytest.raises(WeightSyncError, match="qkv_proj"):
        asyncio.run(engine.load(publish(tmp_path, 4, tiny_model, adapter, wrong), 4))
    other = publish(tmp_path, 5, tiny_model, adapter_of(tiny_model, 4), right)
    with (
        mock.patch("trinity_core.rollout.inference.weight_receiver._published", lambda *_: iter([])),
        pytest.raises(WeightSyncError, match="lora"),
    ):
        asyncio.run(engine.load(other, 5))
    with pytest.raises(DataError):
        asyncio.run(engine.load(WeightSource("folder", str(tmp_path)), 6))
