"""What vLLM keeps of a token of a model with latent attention, by vLLM itself and by our estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
