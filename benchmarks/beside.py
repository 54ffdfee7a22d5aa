"""Three explorers, two trainers of different runs and an evaluation at the same time on one Ray cluster.

    python benchmarks/beside.py [--tasks 48] [--gap 5] [--keep DIR]

The commands are those of a user, with the files of `configs/gsm8k`, small sizes and `cluster.ray_address`:

    trinity run --config configs/gsm8k/trainer.yaml          # the run gsm8k-async: its trainer,
    trinity run --config configs/gsm8k/explorer.yaml         # its explorer,
    trinity run --config configs/gsm8k/explorer_new.yaml     # and a second one
    trinity run --config configs/gsm8k/gsm8k.yaml            # the run gsm8k: its own explorer and trainer
    trinity evaluate --config configs/gsm8k/gsm8k.yaml name=gsm8k-async

They share the cluster (`ray start --head`), the checkpoint folder and the MLflow database in it. Two explorers have the
same name, as have both trainers. Prints what each left behind, and fails if a command fails or if one changed anything
that belongs to another: logs, summaries, metrics, MLflow runs, stores, locks, shared memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from clusters import BIN, SMALL, SMALL_EXPLORER, end_all, run_command, start, stored_rows, wait_for_all
from filelock import FileLock, Timeout
from measured import ROOT
from mlflow import MlflowClient
from runtime.ray_clusters import ray_cluster

from trinity_core.data.tiny import make_tiny
from trinity_core.program import ending_on_sigterm
from trinity_core.runtime.audit import audit_runs, audit_text
from trinity_core.sync.memory import SHARED_MEMORY
from trinity_core.tracking.forwarder import run_note
from trinity_core.tracking.metrics_file import read_metrics

SECONDS = 1200
"""For all of them."""
PROJECT = "Trinity-Flows"
QUIET = "evaluation_explorer"
"""An actor that has nothing to log, unless something goes wrong."""
LOGS = {
    "gsm8k-async": {
        "explorer", "explorer_engine_0", "explorer_new", "explorer_new_engine_0", "trainer_0",
        "evaluation_explorer_engine_0",
    },
    "gsm8k": {"explorer", "explorer_engine_0", "trainer_0"},
}  # fmt: skip
SUMMARIES = {
    "gsm8k-async": {"summary.json", "summary_explorer.json", "summary_explorer_new.json"},
    "gsm8k": {"summary.json"},
}
SOURCES = {
    "gsm8k-async": {"explorer", "explorer_new", "trainer", "eval"},
    "gsm8k": {"explorer", "trainer", "eval"},
}
"""Of a run's metrics."""


def commands(address: str) -> dict[str, list[str]]:
    """What is started, by a name for its log."""
    common = [*SMALL, f"cluster.ray_address={address}"]
    trainer = ["buffer.train_batch_size=32", "buffer.total_epochs=2"]
    whole = [*common, *SMALL_EXPLORER]
    evaluate = [str(BIN / "trinity"), "evaluate", "--config", str(ROOT / "configs/gsm8k/gsm8k.yaml")]
    return {
        "trainer": run_command("configs/gsm8k/trainer.yaml", True, *common, *trainer),
        "explorer": run_command("configs/gsm8k/explorer.yaml", True, *common, *SMALL_EXPLORER),
        "gsm8k": run_command("configs/gsm8k/gsm8k.yaml", True, *whole, "trainer.worker_num=1"),
        "evaluate": [*evaluate, *whole, "name=gsm8k-async"],
        "explorer_new": run_command("configs/gsm8k/explorer_new.yaml", True, *common, *SMALL_EXPLORER),
    }


def faults(project: Path) -> Iterator[str]:
    """What one run has of another, or lacks."""
    notes = {run: run_note(project / run) for run in LOGS}
    if len({note["run_id"] for note in notes.values()}) < len(notes):
        yield "two runs share an MLflow run"
    for run in LOGS:
        yield from (f"{run}: {fault}" for fault in faults_of(run, project / run, notes[run]))


def faults_of(run: str, job: Path, note: dict[str, str]) -> Iterator[str]:
    logs = {path.stem for path in (job / "log").rglob("*.log")} - {QUIET}
    if logs != LOGS[run]:
        yield f"logs of {sorted(logs)}"
    summaries = {path.name for path in job.glob("summary*.json")}
    if summaries != SUMMARIES[run]:
        yield f"summaries {sorted(summaries)}"
    lines = Counter((line.source, line.step) for line in read_metrics(job))
    if {source for source, _ in lines} != SOURCES[run]:
        yield f"metrics of {sorted({source for source, _ in lines})}"
    yield from (f"{count} lines of {source}, step {step}" for (source, step), count in lines.items() if count > 1)
    sent = MlflowClient(note["uri"]).get_run(note["run_id"]).data.metrics
    for explorer in ("explorer", "explorer_new"):
        if (f"{explorer}/experiences/kept" in sent) != (explorer in SOURCES[run]):
            yield f"metrics of {explorer} in MLflow: {sorted(sent)}"
    for name, audit in audit_runs(job).items():
        if not audit.clean or audit.experiences_produced != sum(stored_rows(job).values()):
            yield audit_text(name, audit)
    yield from (f"{lock.name} is held" for lock in job.glob(".*.lock") if is_held(lock))


def is_held(path: Path) -> bool:
    try:
        FileLock(path).acquire(timeout=0)
    except Timeout:
        return True
    return False


def describe(job: Path) -> str:
    summary = json.loads((job / "summary.json").read_text())
    rows = ", ".join(f"{count} rows of {name}" for name, count in sorted(stored_rows(job).items()))
    return f"{job.name}: step {summary['step']}, scores {summary['scores']}, {rows}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=48, help="tasks of the set that is made")
    parser.add_argument("--gap", type=float, default=5.0, help="seconds between two starts")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which stays")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="beside"))
    tiny = make_tiny(folder / "tiny", seed=1, count_train=args.tasks, count_test=16, count_sft=4)
    shared = set(SHARED_MEMORY.glob("trinity-*"))
    settings = {
        "TRINITY_MODEL_PATH": str(tiny.model), "TRINITY_TASKSET_PATH": str(tiny.data), "PYTHONPATH": str(ROOT),
        "TRINITY_CHECKPOINT_ROOT_DIR": str(folder),
    }  # fmt: skip
    try:
        with ray_cluster(folder, nodes=1) as (address, environment):
            began, running = time.monotonic(), {}
            try:
                for name, command in commands(address).items():
                    running[name] = start(command, folder, environment | settings, folder / f"{name}.log")
                    time.sleep(args.gap)
                codes = wait_for_all(running, SECONDS)
            finally:
                end_all(running)
        for name, code in codes.items():
            print(
                f"{name:14} ended with {code}"
                + ("" if not code else f":\n{(folder / f'{name}.log').read_text()[-3000:]}")
            )
        if any(codes.values()):
            sys.exit(1)
        errors = list(faults(folder / PROJECT))
        if left := set(SHARED_MEMORY.glob("trinity-*")) - shared:
            errors.append(f"left in shared memory: {sorted(map(str, left))}")
        print("\n".join([describe(folder / PROJECT / run) for run in LOGS] + [f"FAULT: {fault}" for fault in errors]))
        print(f"{time.monotonic() - began:.0f} s")
        sys.exit(bool(errors))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    with ending_on_sigterm():
        main()
