"""The trainer computes the same function as the engine and the model's own code, in any micro-batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_outcomes import save_random
from raising import raising

from trinity_core.base.errors import TrinityError
from trinity_core.data.experience import Experience
from trinity_core.training.batch import make_batch
from trinity_core.training.distributed import join, meeting_point
from trinity_core.training.learner import Learner
from trinity_core.training.micro import Micros, build_micro
from trinity_core.training.policy import Policy, find_fast_paths, load_causal_lm
from trinity_core.training.update import forward_batch, micro_batches

VOCABULARY, ROW, LONG, LONGEST = 128, 48, 150, 200
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WINDOW = {
    "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": ["sliding_attention"] * 2,
}  # fmt: skip


def longrope() -> dict[str, Any]:
    """Rotary frequencies that differ beyond 64 positions."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 0.5 * i for i in range(16)], "factor": 4.0}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}


def configuration(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model's configuration and the overrides of a run."""
    from transformers import Gemma2Config, Phi3Config, Qwen2Config

    if kind == "window":
        return Qwen2Config(**SIZES), WINDOW
    if kind == "phi3":
        return Phi3Config(**SIZES, rope_parameters=longrope(), original_max_position_embeddings=64, pad_token_id=0), {}
    return Gemma2Config(
        **SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=64, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ), {}  # fmt: skip


def make_model(kind: str, folder: Path) -> dict[str, Any]:
    """Save a model with attention scores large enough to show caps and frequencies; return the overrides."""
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
        return np.asarray(micro.grid(Policy(lm, fast_paths)(micro, 1.0, "none")[0])[0, : ROW - 1])


def own_logprobs(folder: Path, seen: int) -> np.ndarray:
    """Log-probs of the first row by transformers' eager attention; `seen` positions determine the rotary
    frequencies."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = torch.tensor(rows()[0].tokens).long()
    padded = torch.nn.functional.pad(tokens, (0, seen - ROW))
    with torch.no_grad():
        logprobs = lm(padded[None]).logits[0, : ROW - 1].log_softmax(-1)
    return logprobs.gather(-1, tokens[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["phi3", "gemma2"])
def test_logprobs_do_not_depend_on_the_micro_batch(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path)
    alone, beside = (trainer_logprobs(tmp_path, {}, chosen) for chosen in ([0], [0, 1]))
    np.testing.assert_allclose(alone, beside, atol=1e-4)
    np.testing.assert_allclose(alone, own_logprobs(tmp_path, LONGEST), atol=1e-4)


def test_supervised_logprobs_do_not_depend_on_the_micro_batch(make_config: Any, tmp_path: Path) -> None:
    """A later stage on rollouts, and an engine that serves the model, compute the same function."""
    make_model("phi3", tmp_path / "phi3")
    config = make_config(
        "sft", model__model_path=tmp_path / "phi3", model__max_response_tokens=LONGEST - 32,
        buffer__trainer_input__experience_buffer__path="x",
    )  # fmt: skip
    learner = Learner(config, 1, ranks := join(0, 1, *meeting_point(), use_gpu=False))
    batch = make_batch(rows(), ranks.device)

    def alone_or_beside(micros: Micros) -> np.ndarray:
        return np.asarray(
            forward_batch(batch, micros, lambda m: learner.engine(m, 1.0, "none")[0], ranks)[0, : ROW - 1]
        )

    alone, beside = (alone_or_beside(micro_batches(batch, learner.cut, ranks, chosen)) for chosen in ([0], [0, 1]))
    np.testing.assert_allclose(alone, beside, atol=1e-4)
    np.testing.assert_allclose(alone, own_logprobs(tmp_path / "phi3", LONGEST), atol=1e-4)


def test_short_frequencies_serve_a_short_max_model_len(tmp_path: Path) -> None:
    make_model("phi3", tmp_path)
    lm = load_causal_lm(str(tmp_path), torch.float32, max_model_len=64)
    with torch.no_grad():
        tokens = torch.tensor(rows()[0].tokens).long()
        logprobs = lm(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs, own_logprobs(tmp_path, ROW), atol=1e-4)
    assert np.abs(logprobs - own_logprobs(tmp_path, LONGEST)).max() > 0.1


def test_dynamic_frequencies_are_refused_beyond_their_positions(tiny_folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    overrides = {"max_position_embeddings": 64, "rope_parameters": rope}
    load_causal_lm(str(tiny_folder), torch.float32, overrides=overrides, max_model_len=64)
    with raising(TrinityError, key="model.max_model_len"):
        load_causal_lm(str(tiny_folder), torch.float32, overrides=overrides, max_model_len=65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_that_a_sample_does_not_show_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Initial weights: attention scores and logits are far below the caps."""
    save_random("gemma2", tmp_path, num_key_value_heads=1, head_dim=16)
    fast_paths = find_fast_paths(lm := load_causal_lm(str(tmp_path), dtype))
    assert not fast_paths.packing and not fast_paths.own_head
    assert lm.config._attn_implementation == "eager"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "phi3", "gemma2"])
def test_engine_and_trainer_agree(engine_of: Any, kind: str, tmp_path: Path) -> None:
    """With an override that shows after 16 tokens, with longrope and with soft caps; real engine."""
    overrides = make_model(kind, tmp_path)
    engine = engine_of(str(tmp_path), LONGEST, max_num_seqs=4, kv_cache_gib=0.1, model_overrides=overrides)
    scores = np.array(asyncio.run(engine.score([int(token) for token in rows()[0].tokens])))
    for chosen in ([0], [0, 1]):
        np.testing.assert_allclose(scores, trainer_logprobs(tmp_path, overrides, chosen), atol=1e-4)
    if overrides:
        assert np.abs(scores - trainer_logprobs(tmp_path, {}, [0])).max() > 0.1
