"""Latent attention in engines; `test_inference_families` starts some."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raising
from transformers import AutoConfig

from trinity_core.base.errors import WeightSyncError
from trinity_core.exchange.sync.tensorfile import value_digest
from trinity_core.exchange.sync.weight_check import ABSORBED, verify_parameters
from trinity_core.rollout.inference.settings import LATENT, EngineSettings, latent_numbers
from trinity_core.rollout.inference.vllm_types import engine_arguments
from trinity_core.rollout.inference.weight_receiver import parameter_digests


def test_matrices_of_latent_attention_are_checked_as_what_they_are_made_of() -> None:
    """With vLLM's names and sizes; a matrix that no load has recomputed is found."""
    attention, heads, latent = torch.nn.Module(), 4, 8
    attention.kv_b_proj = torch.nn.Linear(latent, heads * 6, bias=False)
    nope, value = attention.kv_b_proj.weight.T.view(latent, heads, 6).split([4, 2], -1)
    attention.W_UK_T = torch.nn.Parameter(nope.permute(1, 2, 0).clone())
    attention.W_UV = torch.nn.Parameter(value.transpose(0, 1).clone())
    published = {"kv_b_proj.weight": value_digest(attention.kv_b_proj.weight, "float32")}
    verify_parameters(1, published, [parameter_digests(attention, "float32")])
    attention.W_UV.data.mul_(2)
    with raising(WeightSyncError, key=f"kv_b_proj.weight{ABSORBED}"):
        verify_parameters(1, published, [parameter_digests(attention, "float32")])


@pytest.mark.parametrize(("kind", "backend"), [("deepseek_v3", "CPU_MLA"), ("qwen2", None)])
def test_latent_attention_on_the_cpu_runs_on_kernels_that_load_weights_again(
    kind: str, backend: str | None, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    arguments = engine_arguments(EngineSettings(str(tmp_path), 64, kv_cache_gib=0.1))
    assert arguments.get("attention_backend") == backend


@pytest.mark.slow
@pytest.mark.parametrize("kind", LATENT)
def test_vllm_computes_the_attention_of_these_models_on_latent_vectors(kind: str) -> None:
    import vllm.config  # noqa: F401 - else its parts import each other in a circle
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = SimpleNamespace(model_type=kind, kv_lora_rank=8)
    assert ModelArchConfigConvertorBase(config, config).is_deepseek_mla()
    assert latent_numbers({"model_type": kind, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_head_dim": 2}) == 14
