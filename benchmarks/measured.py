"""What the step benchmarks share: a small model and data, a real run, and its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "benchmarks"
TINY = BUILD / "tiny"
BENCHMARK = "benchmarks/rft.yaml"
WARM_UP_STEPS = 10
"""First steps that are not counted: memory is mapped, caches are filled, and the first report imports its libraries."""


def make_tiny() -> Path:
    """A model with random weights, so that every answer runs to its limit and lengths are equal everywhere."""
    if not (TINY / "data" / "train.jsonl").exists():
        subprocess.run([trinity(), "tiny", "--out", str(TINY), "--seed", "1"], check=True, cwd=ROOT)
    return TINY


def trinity() -> str:
    """The command of this environment."""
    return str(Path(sys.executable).parent / "trinity")


def run_rft(checkpoints: Path, *overrides: str) -> list[dict]:
    """Run benchmarks/rft.yaml and return its metrics lines."""
    make_tiny()
    return run(BENCHMARK, checkpoints, *overrides)


def run(config: str, checkpoints: Path, *overrides: str, **environment: str) -> list[dict]:
    """Run a configuration with its jobs below `checkpoints`; the metrics lines of the job."""
    environment = {**os.environ, **environment, "TRINITY_CHECKPOINT_ROOT_DIR": str(checkpoints)}
    command = [trinity(), "run", "--config", config, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    lines = newest(checkpoints, "**/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def newest(folder: Path, pattern: str) -> Path:
    """The latest file below `folder` that fits."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def by_source(lines: list[dict], source: str) -> dict[int, dict]:
    """step -> line, of one source, without the warm-up."""
    return {line["step"]: line for line in lines if line["source"] == source and line["step"] > WARM_UP_STEPS}


def cycles(lines: list[dict]) -> dict[int, float]:
    """Seconds of each whole step, from the end of one trainer step to the end of the next."""
    trainer = by_source(lines, "trainer")
    return {step: line["time"] - trainer[step - 1]["time"] for step, line in trainer.items() if step - 1 in trainer}
