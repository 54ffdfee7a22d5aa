"""How much longer a training step takes while another process keeps one core busy.

Steps on an idle machine and next to a busy process alternate, in one command; the trainer has as many threads as there
are cores. With two cores a step may take 1.6 times as long: each of three threads gets two thirds of a core.

    python benchmarks/busy_machine.py [--niceness 15] [--spin 60000]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time

from measured import make_tiny
from training_part import our_step, rollouts

LIMIT = 1.6
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
OTHER = "BUSY_PROCESS"
"""The variable that holds its id."""


def train(rounds: int, other: int) -> int:
    """Take steps beside the process `other` while it is stopped, and while it is busy; 1 if they differ too much."""
    make_tiny()
    rows = rollouts(400)
    step, number = our_step(rows), 0

    def seconds(count: int) -> list[float]:
        nonlocal number
        durations = []
        for _ in range(count):
            number += 1
            began = time.perf_counter()
            step(number)
            durations.append(time.perf_counter() - began)
        return durations

    seconds(5)
    idle, busy = [], []
    for _ in range(rounds):
        idle += seconds(5)
        os.kill(other, signal.SIGCONT)
        seconds(1)
        busy += seconds(5)
        os.kill(other, signal.SIGSTOP)
    ratio = statistics.median(busy) / statistics.median(idle)
    load = os.getloadavg()[0]
    print(f"idle {statistics.median(idle) * 1e3:.0f} ms, busy {statistics.median(busy) * 1e3:.0f} ms, load {load:.1f}")
    print(f"{ratio:.2f} times as long (aim: at most {LIMIT})")
    return int(ratio > LIMIT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--niceness", type=int, default=0, help="of the trainer; Ray's own default is 15")
    parser.add_argument("--spin", type=int, default=0, help="turns that idle threads spin; a run has none")
    args = parser.parse_args()
    if OTHER not in os.environ:
        other = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
        other.send_signal(signal.SIGSTOP)
        os.nice(args.niceness)
        threads = {"OMP_NUM_THREADS": str(args.threads), "GOMP_SPINCOUNT": str(args.spin)}  # read when torch starts
        os.environ.update(threads, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", **{OTHER: str(other.pid)})
        os.execv(sys.executable, [sys.executable, *sys.argv])
    try:
        return train(args.rounds, int(os.environ[OTHER]))
    finally:
        os.kill(int(os.environ[OTHER]), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
