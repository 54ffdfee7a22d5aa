"""A mixture of experts on the CPU, whose kernels need the experts in a layout of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_moe_loads_weights_from_every_source(tmp_path: Path) -> None:
    # vLLM makes the groups of experts with the first engine of a process, and only if that one is such a mixture.
    script = Path(__file__).with_name("experts.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert {model: len(ways) for model, ways in gaps.items()} == {"qwen3": 5, "glm4": 5}
    assert [(model, way, gap) for model, ways in gaps.items() for way, gap in ways.items() if gap > 1e-4] == []
