"""Start runs on a Ray cluster of this machine from the configuration files that users have."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from measured import ROOT

from trinity_core.exchange.tracking.metrics_file import read_metrics

sys.path.insert(0, str(ROOT / "tests"))
from run.ray_clusters import BIN, end

SMALL = (
    "cluster.gpu_per_node=0", "algorithm.repeat_times=4", "model.max_response_tokens=12", "model.max_model_len=128",
)  # fmt: skip
"""Overrides with which the runs of `configs/gsm8k` fit this machine."""
SMALL_EXPLORER = ("buffer.batch_size=4", "explorer.rollout_model.engine_num=1", "explorer.rollout_model.kv_cache_gib=1")


def start(command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A process of a group of its own that works in `folder` and writes to `log`."""
    with log.open("w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def run_command(config: str, flows: bool, *overrides: str) -> list[str]:
    """The command that runs a configuration file, as a Prefect flow or without Prefect."""
    begin = [str(BIN / "trinity"), "run"] if flows else [sys.executable, "-m", "trinity_core.run"]
    return [*begin, "--config", str(ROOT / config), *overrides]


def wait_for_all(running: Mapping[str, subprocess.Popen[bytes]], seconds: float) -> dict[str, int]:
    """The exit code of each run; whatever has not ended within `seconds` is ended."""
    deadline = time.monotonic() + seconds
    try:
        return {name: run.wait(max(deadline - time.monotonic(), 1)) for name, run in running.items()}
    except subprocess.TimeoutExpired:
        return {name: -1 if run.poll() is None else run.returncode for name, run in running.items()}
    finally:
        end_all(running)


def end_all(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """End those that have not ended."""
    for run in running.values():
        if run.poll() is None:
            end(run)


def stored_rows(job: Path) -> Counter[str]:
    """Rows that each explorer stored, by its metrics."""
    rows: Counter[str] = Counter()
    for line in read_metrics(job):
        if line.source.startswith("explorer"):
            rows[line.source] += int(line.metrics["experiences/kept"])
    return rows
