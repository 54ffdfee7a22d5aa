"""The sizes of models of which a plan sees config.json alone, and why it knows nothing of others."""

from __future__ import annotations

import json

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from preflight_configs import config_of
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.exchange.model_fault import quantization_fault
from trinity_core.run.preflight.checks import unready_node
from trinity_core.run.preflight.model_shape import parameters_of, shape_of, why_unknown
from trinity_core.run.preflight.models import missing_models
from trinity_core.run.preflight.needs import AUXILIARY, ENGINE, REWARDS, TRAINER


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_parameters_by_config_json_are_those_of_transformers(tmp_path, kind, tied):
    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(str(tmp_path))
    assert shape is not None
    counted = sum(p.numel() for p in model.parameters())
    assert shape.parameters == pytest.approx(counted, rel=0.01), "but for biases and the norms of q and k"


LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "modules", "mode", "refused"),
    [
        ("deepseek_v3", ["all-linear"], "both", True),
        ("deepseek_v3", ["q_a_proj", "o_proj"], "both", False),
        ("deepseek_v3", ["all-linear"], "train", True),  # on what explorers of their own sample
        ("qwen2_moe", ["all-linear"], "both", True),
        ("qwen2_moe", ["q_proj", "up_proj"], "both", True),
        ("qwen2_moe", ["q_proj", "o_proj"], "both", False),
        ("qwen3_next", ["shared_expert_gate"], "both", True),
        ("qwen3_5_moe", ["all-linear"], "both", True),
    ],
)
def test_an_adapter_that_engines_would_not_apply_is_refused(tmp_path, kind, modules, mode, refused):
    AutoConfig.for_model(kind, **LATENT, q_lora_rank=24).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    lora = f"[{{lora_rank: 4, target_modules: {modules}}}]"
    config = config_of(f"model.model_path={tmp_path}", f"mode={mode}", f"model.lora_configs={lora}")
    key = "model.lora_configs[0].target_modules"
    assert (key in {finding.key for finding in missing_models(config, is_first=True)}) == refused
    for kinds in ({TRAINER: 1},) if mode == "train" else ({TRAINER: 1}, {ENGINE: 1}):
        assert (key in {finding.key for finding in unready_node(config, 0, kinds, reads=True)}) == refused
    assert key not in {finding.key for finding in unready_node(config, 0, {REWARDS: 1}, reads=False)}


@pytest.mark.parametrize(("kind", "refused"), [("gpt_oss", True), ("llama", False)])
def test_a_family_that_engines_compute_otherwise_is_refused(tmp_path, kind, refused):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = config_of(f"model.model_path={tmp_path}")
    for findings in (missing_models(config, is_first=True), unready_node(config, 0, {ENGINE: 1}, reads=False)):
        conflicts = [finding.key for finding in findings if finding.code == "conflict"]
        assert conflicts == ["model.model_path"] * refused


@pytest.mark.parametrize(
    ("kind", "mode", "refused"), [("gemma3", "both", True), ("gemma3", "bench", False), ("gemma3_text", "both", False)]
)
def test_policy_that_reads_images_is_refused_in_training(tmp_path, kind, mode, refused):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    found = missing_models(config_of(f"model.model_path={tmp_path}", f"mode={mode}"), is_first=True)
    assert [finding.key for finding in found if finding.code == "conflict"] == ["model.model_path"] * refused


@pytest.mark.parametrize(
    ("method", "overrides", "refused"),
    [
        ("fp8", [], ["model.model_path"]),
        ("mxfp4", ["mode=train"], ["model.model_path"]),
        ("awq", ["model.lora_configs=[{lora_rank: 4}]"], ["model.model_path"]),
        ("fp8", ["algorithm.algorithm_type=ppo"], ["model.model_path"]),
        ("gptq", ["algorithm.algorithm_type=ppo", "model.model_path=none"], ["model.critic_model_path"]),
        ("fp8", ["model.model_path=none"], []),  # GRPO has no critic
        ("fp8", ["mode=bench"], []),
        ("fp8", ["mode=explore"], []),
        ("bitsandbytes", ["model.lora_configs=[{lora_rank: 4}]"], ["model.model_path"]),
    ],
)
def test_quantized_model_cannot_be_trained(tmp_path, method, overrides, refused):
    folder = tmp_path / "quantized"
    AutoConfig.for_model("llama").save_pretrained(folder)
    entry = {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | entry))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    paths = [f"model.{name}={folder}" for name in ("model_path", "critic_model_path")]
    config = config_of(*paths, *overrides)
    for findings in (missing_models(config, is_first=True), unready_node(config, 0, {TRAINER: 1}, reads=True)):
        assert [finding.key for finding in findings if finding.code == "conflict"] == refused


@pytest.mark.parametrize(("architecture", "gpus", "refused"), [
    ("LlamaForSequenceClassification", 2, True),
    ("LlamaForSequenceClassification", 1, False),
    ("LlamaForCausalLM", 2, False),
])  # fmt: skip
def test_reward_model_on_several_gpus_is_refused(tmp_path, architecture, gpus, refused):
    config = json.dumps({"model_type": "llama", "architectures": [architecture]})
    (tmp_path / "config.json").write_text(config)
    model = f"{{model_path: {tmp_path}, name: judge, tensor_parallel_size: {gpus}}}"
    config = config_of("cluster.gpu_per_node=8", f"explorer.auxiliary_models=[{model}]")
    key, kind = "explorer.auxiliary_models[0].tensor_parallel_size", f"{AUXILIARY} judge"
    for findings in (missing_models(config, is_first=True), unready_node(config, 8, {kind: 1}, reads=False)):
        assert (key in {finding.key for finding in findings}) == refused


def test_base_of_qlora_may_be_stored_in_4_bits():
    stored = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert quantization_fault(stored) and not quantization_fault(stored, four_bits=True)
    assert quantization_fault({"quantization_config": {"quant_method": "fp8"}}, four_bits=True)
    assert quantization_fault({}) == quantization_fault({"quantization_config": None}) == ""


@pytest.mark.parametrize("kind", [ENGINE, TRAINER])
def test_a_start_without_its_adapter_is_refused(tmp_path, kind):
    config = config_of(f"model.lora_configs=[{{lora_rank: 4, path: {tmp_path / 'none'}}}]")
    for findings in (missing_models(config, is_first=True), unready_node(config, 0, {kind: 1}, reads=False)):
        assert "model.lora_configs[0].path" in {finding.key for finding in findings}


def test_model_on_the_hub_is_known_by_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = "maker/small"
    assert shape_of(name) is None
    assert "nor in the cache of the hub" in why_unknown(name)
    folder = tmp_path / "models--maker--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    AutoConfig.for_model("qwen2", hidden_size=64, num_attention_heads=4).save_pretrained(folder / "snapshots" / "abc")
    shape = shape_of(name)
    assert shape is not None
    assert (shape.hidden, shape.channels) == (64, 16)


@pytest.mark.parametrize(
    "config",
    [
        None,
        [1],
        {"model_type": "gpt2", "n_embd": 64},
        {**LATENT, "model_type": "deepseek_v3", "num_experts_per_tok": 4},
    ],
)
def test_reason_is_given_for_a_model_of_unknown_size(tmp_path, config):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) is None
    assert "config.json" in why_unknown(str(tmp_path))
    assert "not here" in why_unknown(str(tmp_path / "later"))


@pytest.mark.parametrize(
    "content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_damaged_weights_have_no_parameters(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert parameters_of(tmp_path) is None


def test_weights_in_mistrals_other_form_are_not_counted_twice(tmp_path):
    for name in ("consolidated", "model"):
        save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / f"{name}.safetensors")
    assert parameters_of(tmp_path) == 6
