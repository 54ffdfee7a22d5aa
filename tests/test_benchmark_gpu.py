"""`benchmarks/gpu.py`: its frame and some parts work, so that minutes on a GPU are not spent on finding out that they
do not. `python benchmarks/gpu.py --tiny` runs all parts on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks/gpu.py"
PARTS = {
    "digests": {"float32_cpu_gb_s", "bfloat16_cpu_gb_s"},
    "sync": {"publish_s", "load_s"},
    "resume": {"copy_s", "copy_again_s", "step_s", "step_beside_copy_again_s", "write_s", "load_s", "exact"},
}
ON_TWO_GPUS = ("push",)
"""Skipped here."""
ENGINE = {
    "start_s", "publish_s", "load_s", "check_gap", "same_seed_same_tokens", "logprob_gap_max", "tokens_s_256",
    "same_greedy_after_sleep", "lora_same_after_sleep",
}  # fmt: skip


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)


@pytest.mark.slow
@mock.patch.dict(os.environ)
def test_parts_work_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; elsewhere a part has one of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = spec_from_file_location("benchmark_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    gpu = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, gpu)
    spec.loader.exec_module(gpu)
    assert gpu.PARTS.keys() >= PARTS.keys() | {*ON_TWO_GPUS}
    assert sum(seconds for seconds, _ in gpu.CALLS.values()) <= 12 * 60, "with three starts, within 15 minutes"

    def run_part(command: list[str], **options: Any) -> None:
        monkeypatch.setattr(sys, "argv", command[1:])
        gpu.main()

    monkeypatch.setattr(gpu, "subprocess", mock.Mock(run=run_part, TimeoutExpired=subprocess.TimeoutExpired))
    only = [argument for name in (*PARTS, *ON_TWO_GPUS) for argument in ("--only", name)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", *only, "--out", str(tmp_path)])
    failed = gpu.main()
    reports = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    states = dict.fromkeys(PARTS, "done") | dict.fromkeys(ON_TWO_GPUS, "skipped")
    assert not failed and {name: part["status"] for name, part in reports.items()} == states, reports
    assert {name: keys - reports[name].keys() for name, keys in PARTS.items()} == {name: set() for name in PARTS}
    assert reports["resume"]["exact"]
    monkeypatch.setitem(gpu.CALLS, "training", (0, ("digests",)))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--out", str(tmp_path)])
    assert not gpu.main() and json.loads((tmp_path / "digests.json").read_text())["status"] == "cut"


@pytest.mark.slow
def test_the_call_of_the_engine_shows_each_number_as_soon_as_it_has_it(tmp_path: Path) -> None:
    done = run(tmp_path, "--tiny", "--call", "engine")
    *seen, whole = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and whole["status"] == "done", done.stderr[-2000:]
    assert {name for line in seen for name in line} >= ENGINE
    assert whole["same_seed_same_tokens"] == whole["same_greedy_after_sleep"] == whole["lora_same_after_sleep"] == 1
    assert whole["logprob_gap_max"] < 1e-4 and whole["check_gap"] < 1e-4
