"""Engines of models with latent attention in a process of their own, started by `test_inference_latent`.

Printed is for each the bytes that vLLM keeps of a token, and what is estimated.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from trinity_core.inference.in_process import InProcessEngine
from trinity_core.inference.settings import EngineSettings
from trinity_core.inference.vllm_types import kv_bytes_of_a_token

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "q_lora_rank": 16, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 2,
    },
    "minicpm3": {},
}  # fmt: skip


async def sizes_of(kind: str, folder: Path) -> tuple[int, int]:
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    engine = InProcessEngine(EngineSettings(str(folder), max_model_len=64, max_num_seqs=2, kv_cache_gib=0.1))
    os.environ.update(engine.settings.environment())
    await engine.start()
    [specs] = engine._engine.collective_rpc("get_kv_cache_spec")
    kept = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    estimate = kv_bytes_of_a_token(engine.settings)
    await engine.stop()
    return kept, estimate


kind = sys.argv[1]
print(json.dumps(asyncio.run(sizes_of(kind, Path(sys.argv[2])))))
