"""Weights of several model families reach an engine: names differ, and so do the copies of the CPU's kernels.

`benchmarks/model_families.py` compares all families.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# vLLM makes the groups of experts with the first engine of a process, and only if that one is such a mixture.
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v2", "gemma2", "gpt2")
WITH_ADAPTER = ("mixtral", "phi3", "minicpm3")
COMPARED = """
import json, sys
from model_families import gaps_of, gaps_with_adapter, together
whole, adapters = json.loads(sys.argv[1])
print(json.dumps([together(whole, gaps_of), together(adapters, gaps_with_adapter)]))
"""


@pytest.mark.slow
def test_models_load_weights_from_every_source() -> None:
    command = [sys.executable, "-c", COMPARED, json.dumps([FAMILIES, WITH_ADAPTER])]
    folder = Path(__file__).parents[2] / "benchmarks"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    whole, adapters = json.loads(done.stdout.splitlines()[-1])
    assert {family: len(gaps) for family, gaps in whole.items()} == dict.fromkeys(FAMILIES, 6)
    assert {family: len(gaps) for family, gaps in adapters.items()} == dict.fromkeys(WITH_ADAPTER, 5)
    gaps = [
        (family, way, gap) for part in (whole, adapters) for family, ways in part.items() for way, gap in ways.items()
    ]
    assert [one for one in gaps if abs(one[2]) > 1e-4] == []
