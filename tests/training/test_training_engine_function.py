"""The trainer computes the function that the engine and the model's own code compute, whatever shares a micro-batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_function import LONGEST, ROW, make_model, rows, trainer_logprobs

from trinity_core.errors import TrinityError
from trinity_core.training.policy import find_fast_paths, load_causal_lm


def own_logprobs(folder: Path, seen: int) -> np.ndarray:
    """Log-probs of the first row by transformers' eager attention; `seen` positions decide on rotary frequencies."""
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
    with pytest.raises(TrinityError, match=r"model\.max_model_len is 65"):
        load_causal_lm(str(tiny_folder), torch.float32, overrides=overrides, max_model_len=65)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_that_a_sample_does_not_show_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights as initialised: attention scores and logits are far below the caps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    Gemma2ForCausalLM(Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=64)).save_pretrained(
        tmp_path
    )
    fast_paths = find_fast_paths(lm := load_causal_lm(str(tmp_path), dtype))
    assert not fast_paths.packing and not fast_paths.own_head
    assert lm.config._attn_implementation == "eager"


@pytest.mark.slow
def test_engine_and_trainer_agree(tmp_path: Path) -> None:
    """With an override that shows after 16 tokens, with longrope and with soft caps; the real engine."""
    script = Path(__file__).with_name("engine_function.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert {(kind, way): gap for kind, of in gaps.items() for way, gap in of.items() if gap > 1e-4}.keys() == {
        ("window", "folder")
    }
    assert gaps["window"]["folder"] > 0.1
