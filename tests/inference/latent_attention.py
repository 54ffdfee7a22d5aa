"""Engines of models with latent attention in a process of their own, started by `test_inference_latent`.

Printed are the bytes that vLLM keeps of a token, what is estimated, and the largest differences of a log-prob: between
an engine that has loaded other weights and one that was started with them, and between that one and transformers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.inference.in_process import InProcessEngine
from trinity_core.inference.requests import Request, Sample, Sampling, WeightSource
from trinity_core.inference.settings import EngineSettings
from trinity_core.inference.vllm_types import kv_bytes_of_a_token
from trinity_core.sync.checkpoint import CheckpointVersions

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "q_lora_rank": 16, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "initializer_range": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 2,
    },
    "minicpm3": {},
}  # fmt: skip


TOKENS = (3, 14, 15, 92, 65, 35, 89, 79)


async def started(folder: Path) -> InProcessEngine:
    limits = {"max_model_len": 64, "max_num_seqs": 2, "kv_cache_gib": 0.1}
    engine = InProcessEngine(EngineSettings(str(folder), dtype="float32", **limits))
    os.environ.update(engine.settings.environment())
    await engine.start()
    return engine


def log_probs(lm: Any, tokens: Sequence[int]) -> list[float]:
    """Those of the tokens after the first by transformers, in nats."""
    with torch.no_grad():
        logits = lm(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def gap(ones: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ones, others, strict=True))


async def sampled(engine: InProcessEngine) -> Sample:
    request = Request("one", np.array(TOKENS, np.int32), Sampling(max_tokens=8, min_tokens=8), seed=1)
    [sample] = (await engine.generate([request])).unpack()
    return sample


async def measured(kind: str, folder: Path) -> tuple[int, int, float, float]:
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "first")
    newer = AutoModelForCausalLM.from_config(config).eval()
    newer.save_pretrained(folder / "newer")
    CheckpointVersions(folder).publish(1, newer.state_dict().items())
    engine = await started(folder / "first")
    [specs] = engine._engine.collective_rpc("get_kv_cache_spec")
    kept = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    estimate = kv_bytes_of_a_token(engine.settings)
    before = await engine.score(TOKENS)
    await engine.load(WeightSource("checkpoint", str(folder)), 1)
    loaded = await engine.score(TOKENS)
    await engine.stop()
    other = await started(folder / "newer")
    expected, sample = await other.score(TOKENS), await sampled(other)
    await other.stop()
    assert before != expected
    engines = [*expected, *sample.logprobs.tolist()]
    by_transformers = log_probs(newer, [*TOKENS, *sample.tokens.tolist()])
    return kept, estimate, gap(loaded, expected), gap(engines, by_transformers)


kind = sys.argv[1]
print(json.dumps(asyncio.run(measured(kind, Path(sys.argv[2])))))
