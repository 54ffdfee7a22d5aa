"""A mixture of experts on the CPU, whose kernels need the experts in a layout of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["qwen3", "glm4"])
def test_moe_loads_weights_from_every_source(tmp_path: Path, model: str) -> None:
    script = Path(__file__).with_name("experts.py")
    done = subprocess.run(
        [sys.executable, script, model, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert len(gaps) == 5
    assert {way: gap for way, gap in gaps.items() if gap > 1e-4} == {}
