"""Two explorers and a trainer, three separate runs on one Ray cluster of two nodes, started in every order.

    python benchmarks/starting_orders.py [--order trainer,explorer,explorer_new …] [--tasks 48] [--gap 5] [--flows]
        [--taskset DIR] [--keep DIR]

The three files are those of `configs/gsm8k`; the cluster is an ordinary one with its token (`ray start`, twice, on this
machine). Overridden are `cluster.ray_address`, `cluster.gpu_per_node=0` and small sizes; the model is a small one. The
trainer has two epochs (`--epochs`), one for the tasks of each explorer. A run starts `--gap` seconds after the one
before. With `--flows` each is a flow (`trinity run`), otherwise `python -m trinity_core.run`, without Prefect.
`--taskset` is a folder with `train.jsonl`; without it a small one is made. With `--keep` the folders of the runs are
kept.

Prints a row for each order: seconds until the last run ended, rows that each explorer stored, rows trained, and rows
that were left when the trainer had finished. Fails if a run fails, if the audit finds anything lost or trained twice,
or if the rows of the explorers are not those trained and those left.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from clusters import SMALL, SMALL_EXPLORER, end_all, run_command, start, stored_rows, wait_for_all
from measured import ROOT
from run.ray_clusters import ray_cluster

from trinity_core.base.program import ending_on_sigterm
from trinity_core.data.tiny import make_tiny
from trinity_core.exchange.store.audit import archived
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.run.audit import audit_runs, audit_text, open_store

FILES = ("explorer", "trainer", "explorer_new")
SECONDS = 600
"""For one order."""
COLUMNS = ("seconds", "explorer", "explorer_new", "trained", "left")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--order", action="append", help="files in order of starting; all six orders by default")
    parser.add_argument("--tasks", type=int, default=48, help="tasks of the set that is made")
    parser.add_argument("--epochs", type=int, default=2, help="of the trainer")
    parser.add_argument("--gap", type=float, default=5.0, help="seconds between two starts")
    parser.add_argument("--flows", action="store_true", help="with Prefect, by `trinity run`")
    parser.add_argument("--taskset", type=Path)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which stays")
    return parser.parse_args()


def command(name: str, address: str, args: argparse.Namespace) -> list[str]:
    """The command that starts one of the three files on the cluster."""
    trains = name == "trainer"
    sizes = ("buffer.train_batch_size=32", f"buffer.total_epochs={args.epochs}") if trains else SMALL_EXPLORER
    return run_command(f"configs/gsm8k/{name}.yaml", args.flows, *SMALL, *sizes, f"cluster.ray_address={address}")


def run_in_order(
    order: Sequence[str], folder: Path, address: str, environment: dict[str, str], args: argparse.Namespace
) -> tuple[float, dict[str, int]]:
    """(seconds, exit code of each run)."""
    folder.mkdir()
    began = time.monotonic()
    environment = environment | {"TRINITY_CHECKPOINT_ROOT_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    running = {}
    try:
        for name in order:
            if running:
                time.sleep(args.gap)
            running[name] = start(command(name, address, args), folder, environment, folder / f"{name}.log")
        codes = wait_for_all(running, SECONDS - time.monotonic() + began)
    finally:
        end_all(running)
    return time.monotonic() - began, codes


def report(order: Sequence[str], folder: Path, seconds: float, codes: dict[str, int]) -> bool:
    """Print the row of an order; True if nothing failed, and every row was trained once or counted as left."""
    job = folder / "Trinity-Flows/gsm8k-async"
    stored, trained = (
        stored_rows(job),
        sum(lines.total() for lines in archived(job / "buffer/experience_buffer.jsonl").values()),
    )
    with ExperienceStore(open_store(job, f"sqlite:///{job}/buffer/gsm8k.db")) as store:
        left = store.untrained()
    audits = audit_runs(job)
    clean = all(audit.clean for audit in audits.values())
    good = clean and not any(codes.values()) and sum(stored.values()) == trained + left and trained > 0
    rows = [seconds, stored["explorer"], stored["explorer_new"], trained, left]
    print(f"{', '.join(order):36}" + "".join(f"{value:14.0f}" for value in rows) + f"  {'ok' if good else 'FAILED'}")
    for name, code in codes.items():
        if code:
            print(f"  {name} ended with {code}:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    if not clean:
        print("\n".join(audit_text(*audit) for audit in audits.items()))
    sys.stdout.flush()
    return good


def main() -> None:
    args = arguments()
    orders = [order.split(",") for order in args.order] if args.order else list(permutations(FILES))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="orders"))
    tiny = make_tiny(folder / "tiny", seed=1, count_train=args.tasks, count_test=4, count_sft=4)
    models = {"TRINITY_MODEL_PATH": str(tiny.model), "TRINITY_TASKSET_PATH": str(args.taskset or tiny.data)}
    good = True
    try:
        with ray_cluster(folder) as (address, environment):
            print(f"{'order of starting':36}" + "".join(f"{column:>14}" for column in COLUMNS), flush=True)
            for index, order in enumerate(orders):
                done = run_in_order(order, folder / f"order{index}", address, environment | models, args)
                good &= report(order, folder / f"order{index}", *done)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(not good)


if __name__ == "__main__":
    with ending_on_sigterm():
        main()
