"""What both pipelines cost: rows per second and peak memory of a task pipeline, seconds per step of experience
operators.

Tasks: the rows are generated, about 40 words each, one in ten the repeat of an earlier one. Operators: length, format,
duplicates, contamination by 1000 eval rows. Each size runs in a process of its own. The claim: memory is bounded, so
ten times the rows take at most 1.25 times the memory.

Experiences: 16 groups of 8 answers of 200 tokens go through seven cheap operators, one after the other. The claim: they
take less than 2 % of a step. The step is the one of a bare loop on two cores (0.66 s for generation, training and
weight sync), or that of `--step-seconds`; for a real run, `timing_s/operators` and `timing_s/step` show the same.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --rows 100000 --step-seconds 2
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trinity_core.config import OperatorConfig
from trinity_core.data.experience import Experience
from trinity_core.pipelines.operators import pipeline
from trinity_core.pipelines.tasks import TaskPipeline, curate

ROWS, EVAL_ROWS, WORDS, CLAIM = 1_000_000, 1000, 40, 1.25
GROUPS, ANSWERS, TOKENS, STEPS, STEP_SECONDS, SHARE = 16, 8, 200, 50, 0.66, 0.02
CHEAP: dict[str, dict[str, object]] = {
    "mask_response_truncated": {},
    "overlong_penalty": {"max_response_length": TOKENS, "cache_length": TOKENS // 2},
    "pass_rate_calculator": {},
    "reward_shaping_mapper": {"reward_shaping_configs": [{"stats_key": "pass_rate", "op_type": "SUB", "weight": 0.5}]},
    "reward_filter": {"min_reward": -10.0},
    "taskset_balance_filter": {},
    "dynamic_sampling": {},
}


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
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    memory = int(peak.split()[1]) / 1024  # `getrusage` would count the process that started this one
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


def answers(step: int) -> list[Experience]:
    """Those of one explore step."""
    draw = np.random.default_rng(step)

    def one(group: int, run: int) -> Experience:
        return Experience(
            draw.integers(0, 5000, TOKENS + 50), 50, np.ones(TOKENS, bool), draw.random(TOKENS) - 1,
            np.full(TOKENS, step), float(draw.integers(0, 2)), group=f"{step}/{group}", run=run, task_index=group,
            truncated=bool(draw.integers(0, 2)), metrics={"accuracy": 1.0}, info={"taskset": f"set {group % 2}"},
        )  # fmt: skip

    return [one(group, run) for group in range(GROUPS) for run in range(ANSWERS)]


def experience_seconds() -> float:
    """Median seconds that the cheap operators take for a step."""
    operators = pipeline([OperatorConfig(name=name, args=args) for name, args in CHEAP.items()])
    operators.run(answers(0))  # imports
    seconds = []
    for step in range(1, STEPS + 1):
        rollouts = answers(step)
        began = time.perf_counter()
        left, _ = operators.run(rollouts)
        seconds.append(time.perf_counter() - began)
        assert left
    return float(np.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the large data set")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="seconds of a step of the run")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    seconds = experience_seconds()
    share, rows = seconds / args.step_seconds, GROUPS * ANSWERS
    print(
        f"{len(CHEAP)} experience operators: {rows / seconds:.0f} rows a second, {seconds * 1000:.1f} ms for {rows} "
        f"rows, {share:.2%} of a step of {args.step_seconds:g} s (claim: below {SHARE:.0%})", flush=True,
    )  # fmt: skip
    small, large = measured(args.rows // 10), measured(args.rows)
    ratio = large["MiB"] / small["MiB"]
    print(f"memory, ten times the rows: x {ratio:.2f} (claim: at most {CLAIM})")
    if ratio > CLAIM or share >= SHARE:
        sys.exit(1)


if __name__ == "__main__":
    main()
