"""Engines of several model families in a process of their own, started by `test_inference_families`.

Each loads weights from every source; printed is, for each, the largest gap in a log-prob to transformers.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trinity_core.inference.in_process import InProcessEngine
from trinity_core.inference.requests import WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.sync.versions import open_versions
from trinity_core.sync.weight_check import WeightCheck

TOKENS = (3, 14, 15, 92, 65, 35)


def small() -> Any:
    """Experts of a width that vLLM's kernels take only with padding."""
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def with_shared_expert() -> Any:
    """Also with a dense first layer, and a bias of the router that is a buffer of the trainer's model."""
    config = Glm4MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config).eval()
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.1 * torch.randn(4))
    return model


SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 48}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def named_otherwise(kind: str, **sizes: Any) -> Any:
    """A model whose tensors transformers names otherwise than vLLM, or whose head vLLM does not have."""
    # Gemma 2's soft caps are left out of transformers' SDPA.
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


MODELS = {
    "qwen3": small,
    "glm4": with_shared_expert,
    "mixtral": partial(named_otherwise, "mixtral", **EXPERTS),
    "deepseek": partial(named_otherwise, "deepseek_v2", **EXPERTS, **LATENT),
    "gemma2": partial(named_otherwise, "gemma2", query_pre_attn_scalar=32, sliding_window=4),
    "gpt2": partial(named_otherwise, "gpt2"),
}


def changed(model: Any) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


def logprobs(model: Any) -> torch.Tensor:
    tokens = torch.tensor([TOKENS])
    with torch.no_grad():
        return model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


async def gaps_of(kind: str, folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.save_pretrained(folder / "model")
    engine = InProcessEngine(EngineSettings(str(folder / "model"), max_model_len=64, max_num_seqs=4, kv_cache_gib=0.1))
    os.environ.update(engine.settings.environment())
    await engine.start()

    async def gap(of: Any) -> float:
        return float((torch.tensor(await engine.score(TOKENS)) - logprobs(of)).abs().max())

    gaps = {"start": await gap(model)}
    weights = open_versions("checkpoint", folder)
    for version in (1, 2, 3):
        model = changed(model)
        weights.publish(version, model.state_dict().items(), WeightCheck(TOKENS, tuple(logprobs(model).tolist())))
        await engine.load(WeightSource("checkpoint", str(folder)), version)
        gaps[f"version {version}"] = await gap(model)
    model = changed(model)
    model.save_pretrained(folder / "other")
    await engine.load(WeightSource("folder", str(folder / "other")), 4)
    gaps["folder"] = await gap(model)
    await engine.stop()
    return gaps


print(json.dumps({kind: asyncio.run(gaps_of(kind, Path(sys.argv[1]) / kind)) for kind in MODELS}))
