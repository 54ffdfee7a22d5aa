"""Engines of small models in a process of their own, started by `test_training_engine_function`.

Prints for each model the largest gap between the engine's log-probs of a row and three others: the trainer's of the row
alone, the trainer's beside a longer row, and those of the folder's configuration without overrides.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, Phi3Config, Qwen2Config

from trinity_core.data.experience import Experience
from trinity_core.inference.in_process import InProcessEngine
from trinity_core.inference.settings import EngineSettings
from trinity_core.training.micro import build_micro
from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm

VOCABULARY, ROW, LONG, LONGEST = 128, 48, 150, 200
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WINDOW = {
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2,
}  # fmt: skip


def longrope() -> dict[str, Any]:
    """Other frequencies beyond 64 positions."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)], "factor": 4.0}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}


def configuration(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model's configuration and what a run overrides of it."""
    if kind == "window":
        return Qwen2Config(**SIZES), WINDOW
    if kind == "phi3":
        return Phi3Config(**SIZES, rope_parameters=longrope(), original_max_position_embeddings=64, pad_token_id=0), {}
    return Gemma2Config(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=64, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ), {}  # fmt: skip


def make_model(kind: str, folder: Path) -> dict[str, Any]:
    """Save a model whose attention scores are large enough for caps and frequencies to show; returns the overrides."""
    from transformers import AutoModelForCausalLM

    config, overrides = configuration(kind)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(15.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 4.0)
    lm.save_pretrained(folder)
    return overrides


def rows() -> list[Experience]:
    """A row and a longer one."""
    rng = np.random.default_rng(0)
    return [
        Experience(tokens=rng.integers(3, VOCABULARY, n), prompt_length=1, action_mask=np.ones(n - 1, dtype=np.bool_))
        for n in (ROW, LONG)
    ]


def trainer_logprobs(folder: Path, overrides: dict[str, Any], chosen: list[int]) -> np.ndarray:
    """The trainer's log-probs of the first row, computed together with the rows `chosen`."""
    lm = load_causal_lm(str(folder), torch.float32, overrides=overrides, max_model_len=LONGEST)
    fast_paths = find_fast_paths(lm)
    with torch.no_grad():
        micro = build_micro(rows(), chosen, LONG - 1, fast_paths.packing).to(torch.device("cpu"))
        return np.asarray(micro.grid(Policy(lm, fast_paths)(micro, 1.0, False)[0])[0, : ROW - 1])


async def main(folder: Path) -> dict[str, dict[str, float]]:
    gaps = {}
    for kind in ("window", "phi3", "gemma2"):
        path = folder / kind
        overrides = make_model(kind, path)
        settings = EngineSettings(str(path), LONGEST, max_num_seqs=4, kv_cache_gib=0.1, model_overrides=overrides)
        os.environ.update(settings.environment())
        engine = InProcessEngine(settings)
        await engine.start()
        scores = np.array(await engine.score([int(token) for token in rows()[0].tokens]))
        await engine.stop()
        others = {
            "alone": trainer_logprobs(path, overrides, [0]),
            "beside": trainer_logprobs(path, overrides, [0, 1]),
            "folder": trainer_logprobs(path, {}, [0]),
        }
        gaps[kind] = {name: float(np.abs(scores - other).max()) for name, other in others.items()}
    return gaps


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
