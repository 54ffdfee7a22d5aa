"""Rows a second and peak memory of the task pipeline, on a small and on a large data set.

The rows are made up: about 40 words each, one in ten the repeat of an earlier one. Operators: length, format,
duplicates, contamination by 1000 eval rows. Each size runs in a process of its own. The claim: memory is bounded, so
ten times the rows take at most 1.25 times the memory.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --rows 100000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trinity_core.config import OperatorConfig
from trinity_core.pipelines.tasks import TaskPipeline, curate

ROWS, EVAL_ROWS, WORDS, CLAIM = 1_000_000, 1000, 40, 1.25


def make(path: Path, rows: int, seed: int) -> None:
    """Write a data set row by row."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(rows):
            each = random.Random(f"{seed} {number - draw.randrange(1, 1000) if number % 10 == 9 else number}")
            question = " ".join(f"w{each.randrange(5000)}" for _ in range(WORDS))
            file.write(json.dumps({"question": question, "answer": f"so it is\n#### {number % 97}"}) + "\n")


def measure(folder: Path) -> None:
    """Run the pipeline on `folder` in this process, and print its figures as JSON."""
    keys = {"input_keys": ["question"]}
    arguments = {
        "text_length_filter": {**keys, "min_len": 10, "max_len": 1000},
        "format_check_filter": {"input_key": "answer", "pattern": r"\n#### -?[\d.,]+$"},
        "duplicate_filter": keys,
        "contamination_filter": {**keys, "eval_paths": [str(folder)]},
    }
    operators = [OperatorConfig(name=name, args=args) for name, args in arguments.items()]
    started = time.perf_counter()
    made = curate(TaskPipeline([str(folder)], operators), folder / "out")
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"read": made.read, "kept": made.rows, "rows_per_second": made.read / seconds, "MiB": memory}))


def measured(rows: int) -> dict[str, float]:
    """Figures of one size, from a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "train.jsonl", rows, seed=0)
        make(folder / "test.jsonl", EVAL_ROWS, seed=1)
        command = [sys.executable, __file__, "--measure", name]
        found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    print(
        f"{rows:>9} rows: {found['rows_per_second']:7.0f} rows a second, peak memory {found['MiB']:.0f} MiB, "
        f"{found['kept']} kept", flush=True,
    )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the large data set")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    small, large = measured(args.rows // 10), measured(args.rows)
    ratio = large["MiB"] / small["MiB"]
    print(f"memory, ten times the rows: x {ratio:.2f} (claim: at most {CLAIM})")
    if ratio > CLAIM:
        sys.exit(1)


if __name__ == "__main__":
    main()
