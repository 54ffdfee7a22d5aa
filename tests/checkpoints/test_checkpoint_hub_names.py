"""Converted models have the tensors that transformers' `save_pretrained` writes: names, values and types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.base.errors import DataError
from trinity_core.base.layout import ADAPTER, shard_name
from trinity_core.config import LoraConfig
from trinity_core.exchange.checkpoints.adapters import A, B, adapter_config
from trinity_core.exchange.checkpoints.beginning import STATE
from trinity_core.exchange.checkpoints.convert import INDEX, convert

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "moe_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "shared_expert_intermediate_size": 16, "mamba_d_state": 4,
}  # fmt: skip
KINDS = (
    "qwen2", "gpt2", "gemma2", "qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "minimax", "phimoe", "deepseek_v3",
    "granitemoe", "jamba", "hrm_text", "exaone_moe",
)  # fmt: skip


def made(kind: str, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def checkpoint(root: Path, model: Any, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of two ranks, as our trainer writes it."""
    actor = root / "global_step_1" / "actor"
    model.config.save_pretrained(actor / "huggingface")
    for rank in (0, 1):
        torch.save(dict(list(tensors.items())[rank::2]), actor / shard_name("model", 2, rank))
    return actor.parent


def assert_same(folder: Path, saved: dict[str, torch.Tensor]) -> None:
    written = tensors_in(folder)
    assert set(written) == set(saved)
    assert [name for name in saved if written[name].dtype != saved[name].dtype] == []
    assert [name for name in saved if not torch.equal(written[name], saved[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_converted_tensors_are_those_that_transformers_saves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files, between which experts of a layer are divided; from names in memory and from those on the hub."""
    monkeypatch.setattr("trinity_core.exchange.checkpoints.convert.LARGEST_FILE", 8_000)
    model = made(kind)
    model.save_pretrained(tmp_path / "saved")
    saved, stored = tensors_in(tmp_path / "saved"), model.state_dict()
    in_memory = dict(model.named_parameters())
    in_memory |= {name: buffer for name, buffer in model.named_buffers() if name in stored}
    converted = convert(checkpoint(tmp_path / "ours", model, in_memory))
    assert (converted / INDEX).is_file()
    assert_same(converted, saved)
    assert_same(convert(checkpoint(tmp_path / "theirs", model, saved)), saved)
    loaded = AutoModelForCausalLM.from_pretrained(converted)
    assert [name for name, p in loaded.named_parameters() if not torch.equal(p, in_memory[name])] == []


def test_experts_of_the_wrong_number_are_refused_by_their_names_on_the_hub(tmp_path: Path) -> None:
    model = made("mixtral")
    tensors = dict(model.named_parameters())
    tensors["model.layers.0.mlp.experts.down_proj"] = tensors["model.layers.0.mlp.experts.down_proj"][:3]
    with pytest.raises(DataError):
        convert(checkpoint(tmp_path, model, tensors))


def test_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    tensors = dict(made("hrm_text").named_parameters())
    del tensors[next(name for name in tensors if name.endswith("gate_proj.weight"))]
    with pytest.raises(DataError):
        convert(checkpoint(tmp_path, made("hrm_text"), tensors))


def test_an_adapter_is_merged_into_matrices_that_the_hub_names_otherwise(tmp_path: Path) -> None:
    model = made("phimoe")
    model.save_pretrained(tmp_path / "base")
    saved, name, on_hub = (
        tensors_in(tmp_path / "base"),
        "model.layers.1.mlp.router",
        "model.layers.1.block_sparse_moe.gate",
    )
    out, into = model.get_submodule(name).weight.shape
    adapter = {f"{name}{A}": torch.ones(2, into), f"{name}{B}": torch.ones(out, 2)}
    step = checkpoint(tmp_path, model, adapter)
    (step / "actor" / ADAPTER).mkdir()
    config = adapter_config(LoraConfig(lora_rank=2, lora_alpha=4), str(tmp_path / "base"), ["gate"])
    (step / "actor" / ADAPTER / "adapter_config.json").write_text(json.dumps(config))
    (step / STATE).write_text(json.dumps({"began": {}}))
    merged = {name: tensor.float() for name, tensor in saved.items()}
    merged[f"{on_hub}.weight"] += 4
    assert_same(convert(step, tmp_path / "base", merge=True), merged)
