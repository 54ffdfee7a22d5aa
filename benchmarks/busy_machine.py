"""How much longer a training step takes while another process keeps one core busy.

Steps on an idle machine and beside a busy process are taken in turn, in one command, by a trainer with as many threads as
there are cores. With two cores a step may take 1.6 times as long: the other process takes its share of both, and what
remains is divided evenly.

    python benchmarks/busy_machine.py [--niceness 15] [--spin 60000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from measured import make_tiny
from training_part import our_step, rollouts

LIMIT = 1.6
BUSY = "while True: pass"


def train(rounds: int) -> None:
    """Alternate; print the medians of both kinds and their ratio."""
    from trinity_core.data.tokenizer import load_tokenizer

    rows = rollouts(len(load_tokenizer(str(make_tiny() / "model"))))
    step, number = our_step(rows), 0

    def seconds(count: int) -> list[float]:
        nonlocal number
        found = []
        for _ in range(count):
            number += 1
            began = time.perf_counter()
            step(number)
            found.append(time.perf_counter() - began)
        return found

    seconds(5)
    idle, busy = [], []
    for _ in range(rounds):
        idle += seconds(5)
        other = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
        os.setpriority(os.PRIO_PROCESS, other.pid, 0) if os.geteuid() == 0 else None
        try:
            seconds(1)
            busy += seconds(5)
        finally:
            other.kill()
            other.wait()
    ratio = statistics.median(busy) / statistics.median(idle)
    load = os.getloadavg()[0]
    print(f"idle {statistics.median(idle) * 1e3:.0f} ms, busy {statistics.median(busy) * 1e3:.0f} ms, load {load:.1f}")
    print(f"{ratio:.2f} times as long (aim: at most {LIMIT})")
    sys.exit(ratio > LIMIT)


def main() -> None:
    from trinity_core.inference.settings import SPIN_COUNT_ALONE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--niceness", type=int, default=0, help="of the trainer; Ray's own default is 15")
    parser.add_argument("--spin", type=int, default=SPIN_COUNT_ALONE, help="turns that idle threads spin")
    args = parser.parse_args()
    wanted = {"OMP_NUM_THREADS": str(args.threads), "GOMP_SPINCOUNT": str(args.spin)}
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # read when a process starts
        os.nice(args.niceness)
        os.environ.update(wanted, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - this command
    train(args.rounds)


if __name__ == "__main__":
    main()
