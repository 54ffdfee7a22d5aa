"""Wrong weights in a bfloat16 engine, whose log-probs are too coarse to show them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_core.sync.weight_check import TOLERANCES

pytestmark = pytest.mark.slow

NOT_HELD = r"the engine does not hold version {} of the weights: its parameter "
ERRORS = {
    "none": "",
    "bytes of the step before": r"version 2 of the weights in .* its tensor \S+ is not the one .* that of version 1$",
    "one stale tensor": r"version 4 of .* its tensor model.layers.1.input_layernorm.weight .* that of version 3$",
    "nothing loaded": NOT_HELD.format(6) + r"\S+ still holds the values of version 5 \(and \d+ more\)$",
    "norm skipped": NOT_HELD.format(8) + r"model.layers.1.input_layernorm.weight still holds the values of version 7$",
    "bias skipped": NOT_HELD.format(10) + r"model.layers.0.self_attn.qkv_proj.bias \(made of model.layers.0.self_attn"
    r".k_proj.bias, \S+, \S+\) .*$",
    "norms exchanged": NOT_HELD.format(12) + r"model.layers.0.input_layernorm.weight holds other values than the "
    r"trainer published \(and 1 more\)$",
    "tied head skipped": NOT_HELD.format(14) + r"lm_head.weight \(packed\) still holds the values of version 13$",
    "none again": "",
}


def test_wrong_weights_of_a_bfloat16_engine_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("stale.py")
    done = subprocess.run(
        [sys.executable, script, tiny_folder, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for fault, pattern in ERRORS.items():
        error, gap = found.pop(fault)
        assert re.fullmatch(pattern, error), (fault, error)
        assert gap < TOLERANCES["bfloat16"], "the log-probs alone would have let it pass"
    assert not found
