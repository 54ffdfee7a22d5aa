"""Weights of several model families reach an engine: their names differ, and so does what the CPU's kernels keep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks/model_families.py"
FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v2", "gemma2", "gpt2")


def test_models_load_weights_from_every_source() -> None:
    # vLLM makes the groups of experts with the first engine of a process, and only if that one is such a mixture.
    command = [sys.executable, SCRIPT, "--together", *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert {family: len(ways) for family, ways in gaps.items()} == dict.fromkeys(FAMILIES, 5)
    assert [(family, way, gap) for family, ways in gaps.items() for way, gap in ways.items() if gap > 1e-4] == []
