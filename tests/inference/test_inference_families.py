"""Weights of several model families reach an engine: their names differ, and so does what the CPU's kernels keep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks/model_families.py"
# vLLM makes the groups of experts with the first engine of a process, and only if that one is such a mixture.
FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v2", "gemma2", "gpt2", "cohere2")
WITH_ADAPTER = ("mixtral", "phi3", "gemma2", "minicpm3")


@pytest.mark.parametrize(("options", "families", "ways"), [((), FAMILIES, 5), (("--lora",), WITH_ADAPTER, 4)])
def test_models_load_weights_from_every_source(options: tuple[str, ...], families: tuple[str, ...], ways: int) -> None:
    command = [sys.executable, SCRIPT, *options, "--together", *families]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert {family: len(gap) for family, gap in gaps.items()} == dict.fromkeys(families, ways)
    assert [(family, way, gap) for family, gaps_of in gaps.items() for way, gap in gaps_of.items() if gap > 1e-4] == []
