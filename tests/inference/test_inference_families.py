"""Weights of several model families reach an engine: their names differ, and so does what the CPU's kernels keep."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_models_load_weights_from_every_source(tmp_path: Path) -> None:
    # vLLM makes the groups of experts with the first engine of a process, and only if that one is such a mixture.
    script = Path(__file__).with_name("model_families.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert {model: len(ways) for model, ways in gaps.items()} == dict.fromkeys(
        ("qwen3", "glm4", "mixtral", "deepseek", "gemma2", "gpt2"), 5
    )
    assert [(model, way, gap) for model, ways in gaps.items() for way, gap in ways.items() if gap > 1e-4] == []
