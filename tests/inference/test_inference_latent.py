"""What vLLM keeps of a token of a model with latent attention, by vLLM itself and by our estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity_core.inference.settings import LATENT, latent_numbers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["deepseek_v3", "minicpm3"])
@pytest.mark.timeout(400)
def test_the_cache_of_latent_attention_is_as_large_as_estimated(kind: str, tmp_path: Path) -> None:
    """The one keeps the latent vector, the other whole keys and values."""
    script = Path(__file__).with_name("latent_attention.py")
    command = [sys.executable, script, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kept, estimate = json.loads(done.stdout.splitlines()[-1])
    assert kept == estimate > 0


@pytest.mark.parametrize("kind", LATENT)
def test_vllm_computes_the_attention_of_these_models_on_latent_vectors(kind: str) -> None:
    import vllm.config  # noqa: F401 - else its parts import each other in a circle
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = SimpleNamespace(model_type=kind, kv_lora_rank=8)
    assert ModelArchConfigConvertorBase(config, config).is_deepseek_mla()
    assert latent_numbers({"model_type": kind, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_head_dim": 2}) == 14
