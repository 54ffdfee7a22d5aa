"""How much memory each process of a run, and the run's files, grow per step.

    python benchmarks/soak.py [--steps 600]      # 6 minutes on two quiet cores

This is a real run of the small model: 16 rollouts of 8 tokens per step, and a checkpoint every 20 steps, of which two
are kept. A process's own memory (USS) is compared between a third and nine tenths of the steps. The claim: no process
grows by more than 8 KiB per step; an explorer that kept its rollouts grew by 39. Metrics and logs do grow with the
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
from measured import BENCHMARK, ROOT, make_tiny, trinity

MARK = "TRINITY_SOAK"
CLAIM = 8.0
"""KiB a step."""
SECONDS = 2.0
SETTINGS = (
    "trainer.save_interval=20", "trainer.max_checkpoints_to_keep=2", "trainer.worker_num=1",
    "trainer.torch_compile=false",
    "explorer.rollout_model.engine_num=1", "explorer.rollout_model.enforce_eager=true", "buffer.batch_size=4",
    "explorer.rollout_model.kv_cache_gib=0.25", "algorithm.repeat_times=4", "model.max_response_tokens=8",
)  # fmt: skip
Sample = dict[str, float]
"""Process or folder → MiB."""


def processes(mark: str) -> Iterator[psutil.Process]:
    """Those whose environment holds the mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                yield process
        except psutil.Error:
            continue


def sample(mark: str, job: Path) -> Sample:
    """Memory of each process, by its name and number, and the sizes of the job's folders."""
    sizes: Sample = {}
    for process in processes(mark):
        try:
            name = (process.cmdline() or [process.name()])[0].rpartition("/")[2].partition(".")[0]
            sizes[f"{name[:40]} {process.pid}"] = process.memory_full_info().uss / 2**20
        except psutil.Error:
            continue
    for folder in ("buffer", "monitor"):
        files = [file.stat().st_size for file in (job / folder).rglob("*") if file.is_file()]
        sizes[f"folder {folder}"] = sum(files) / 2**20
    return sizes


def trained(job: Path) -> int:
    """Steps that the trainer has recorded."""
    file = job / "monitor/metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((step["step"] for step in map(json.loads, lines) if step["source"] == "trainer"), default=0)


def main() -> None:
    """Run, sample, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    steps, mark = parser.parse_args().steps, uuid4().hex
    make_tiny()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {MARK: mark, "TRINITY_CHECKPOINT_ROOT_DIR": folder}
        command = [trinity(), "run", "--config", BENCHMARK, f"buffer.total_steps={steps}", *SETTINGS]
        samples: dict[int, Sample] = {}
        with (
            Path(folder, "output").open("w") as output,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output) as run,
        ):
            while run.poll() is None:
                time.sleep(SECONDS)
                jobs = [file.parent.parent for file in Path(folder).glob("*/*/monitor/metrics.jsonl")]
                if jobs and (step := trained(jobs[0])):
                    samples[step] = sample(mark, jobs[0])
        if run.returncode:
            sys.exit(Path(folder, "output").read_text()[-4000:])
    first, last = (min(samples, key=lambda step: abs(step - wanted)) for wanted in (steps // 3, steps * 9 // 10))
    print(f"steps {first} to {last}: MiB, MiB, KiB a step")
    worst = 0.0
    for name in sorted(samples[first].keys() & samples[last].keys()):
        before, after = samples[first][name], samples[last][name]
        growth = (after - before) * 1024 / (last - first)
        worst = max(worst, growth if not name.startswith("folder") else 0.0)
        print(f"{name:48} {before:8.1f} {after:8.1f} {growth:8.1f}")
    print(f"largest growth of a process: {worst:.1f} KiB a step, claim {CLAIM:g}: {'yes' if worst < CLAIM else 'NO'}")


if __name__ == "__main__":
    main()
