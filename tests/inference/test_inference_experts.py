"""A mixture of experts on the CPU, whose kernels need the experts in a layout of their own."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_core.inference.requests import WeightSource
from trinity_core.sync.versions import open_versions
from trinity_core.sync.weight_check import WeightCheck

pytestmark = pytest.mark.slow

TOKENS = (3, 14, 15, 92, 65, 35)


def small() -> Any:
    """Experts of a width that vLLM's kernels take only with padding."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def with_shared_expert() -> Any:
    """Also with a dense first layer, and a bias of the router that is a buffer of the trainer's model."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

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


MODELS = {"qwen3": small, "glm4": with_shared_expert}


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


@pytest.mark.parametrize("kind", MODELS)
def test_moe_loads_weights_from_every_source(engine_of: Any, kind: str, tmp_path: Path) -> None:
    """Its log-probs are those of transformers, at the start and after each load."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "model")
    engine = engine_of(str(tmp_path / "model"), max_model_len=64, max_num_seqs=4, kv_cache_gib=0.1)

    def check(model: Any) -> None:
        scores = torch.tensor(asyncio.run(engine.score(TOKENS)))
        torch.testing.assert_close(scores, logprobs(model), atol=1e-4, rtol=0, check_dtype=False)

    check(model)
    weights = open_versions("checkpoint", tmp_path)
    for version in (1, 2, 3):
        model = changed(model)
        weights.publish(version, model.state_dict().items(), WeightCheck(TOKENS, tuple(logprobs(model).tolist())))
        asyncio.run(engine.load(WeightSource("checkpoint", str(tmp_path)), version))
        check(model)
    model = changed(model)
    model.save_pretrained(tmp_path / "other")
    asyncio.run(engine.load(WeightSource("folder", str(tmp_path / "other")), 4))
    check(model)
