"""Two explorers and a trainer, three runs of their own on one Ray cluster of two nodes, in every order of starting.

    python benchmarks/starting_orders.py [--order trainer,explorer,explorer_new …] [--tasks 48] [--gap 5] [--flows]
        [--taskset DIR]

The three files are those of `configs/gsm8k`; the cluster is an ordinary one with its token (`ray start`, twice, on
this machine). Overridden are `cluster.ray_address`, `cluster.gpu_per_node=0` and small sizes; the model is a small
one. A run starts `--gap` seconds after the one before. With `--flows` each is a flow (`trinity run`), otherwise the
same without Prefect (`trinity_core.runtime.run`). `--taskset` is a folder with `train.jsonl`; without it a small one
is made.

Prints a row for each order: seconds until the last run ended, rows that each explorer stored, rows trained. Fails if a
run fails, or if a row that was stored was not trained exactly once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from measured import ROOT

from trinity_core.data.tiny import make_tiny
from trinity_core.tracking import read_metrics

sys.path.insert(0, str(ROOT / "tests"))
from runtime.ray_clusters import BIN, end, ray_cluster

FILES = ("explorer", "trainer", "explorer_new")
SECONDS = 600
"""For one order."""
SMALL = (
    "cluster.gpu_per_node=0", "algorithm.repeat_times=4", "model.max_response_tokens=12", "model.max_model_len=128",
)  # fmt: skip
SIZES = {
    "explorer": ("buffer.batch_size=4", "explorer.rollout_model.engine_num=1", "explorer.rollout_model.kv_cache_gib=1"),
    "trainer": ("buffer.train_batch_size=32",),
}
SIZES["explorer_new"] = SIZES["explorer"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", action="append", help="files in order of starting; all six orders by default")
    parser.add_argument("--tasks", type=int, default=48, help="tasks of the set that is made")
    parser.add_argument("--gap", type=float, default=5.0, help="seconds between two starts")
    parser.add_argument("--flows", action="store_true", help="with Prefect, by `trinity run`")
    parser.add_argument("--taskset", type=Path)
    return parser.parse_args()


def command(name: str, flows: bool) -> list[str]:
    file = str(ROOT / "configs/gsm8k" / f"{name}.yaml")
    begin = [str(BIN / "trinity"), "run"] if flows else [sys.executable, "-m", "trinity_core.runtime.run"]
    return [*begin, "--config", file, *SMALL, *SIZES[name]]


def run_in_order(
    order: Sequence[str], folder: Path, address: str, environment: dict[str, str], gap: float, flows: bool
) -> tuple[float, dict[str, int]]:
    """(seconds, exit code of each run)."""
    folder.mkdir()
    began = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    environment = environment | {"TRINITY_CHECKPOINT_ROOT_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    try:
        for name in order:
            if running:
                time.sleep(gap)
            with (folder / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    [*command(name, flows), f"cluster.ray_address={address}"], cwd=folder, env=environment, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        codes = {name: run.wait(max(SECONDS - time.monotonic() + began, 1)) for name, run in running.items()}
    finally:
        for run in running.values():
            if run.poll() is None:
                end(run)
    return time.monotonic() - began, codes


def stored_rows(job: Path) -> Counter[str]:
    """Rows that each explorer stored."""
    rows: Counter[str] = Counter()
    for line in read_metrics(job):
        if line.source.startswith("explorer"):
            rows[line.source] += int(line.metrics["experiences/kept"])
    return rows


def trained_rows(job: Path) -> Counter[tuple[str, int]]:
    """How often each row was trained on."""
    path = job / "buffer/experience_buffer.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return Counter((line["group"], line["run"]) for line in lines)


def report(order: Sequence[str], folder: Path, seconds: float, codes: dict[str, int]) -> bool:
    """Print the row of an order; True if nothing failed, and every row was trained once."""
    job = folder / "Trinity-Flows/gsm8k-async"
    stored, trained = stored_rows(job), trained_rows(job)
    good = not any(codes.values()) and sum(stored.values()) == len(trained) == trained.total() > 0
    rows = [seconds, stored["explorer"], stored["explorer_new"], trained.total()]
    print(f"{', '.join(order):36}" + "".join(f"{value:14.0f}" for value in rows) + f"  {'ok' if good else 'FAILED'}")
    for name, code in codes.items():
        if code:
            print(f"  {name} ended with {code}:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    return good


def main() -> None:
    args = arguments()
    orders = [each.split(",") for each in args.order] if args.order else list(permutations(FILES))
    folder = Path(tempfile.mkdtemp(prefix="orders"))
    tiny = make_tiny(folder / "tiny", seed=1, count_train=args.tasks, count_test=4, count_sft=4)
    models = {"TRINITY_MODEL_PATH": str(tiny.model), "TRINITY_TASKSET_PATH": str(args.taskset or tiny.data)}
    good = True
    try:
        with ray_cluster(folder) as (address, environment):
            print(f"{'order of starting':36}{'seconds':>14}{'explorer':>14}{'explorer_new':>14}{'trained':>14}")
            for index, order in enumerate(orders):
                done = run_in_order(
                    order, folder / f"order{index}", address, environment | models, args.gap, args.flows
                )
                good &= report(order, folder / f"order{index}", *done)
                sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(not good)


if __name__ == "__main__":
    main()
