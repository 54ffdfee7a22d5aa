"""Steps to a fixed accuracy on the small model's data: `shuffle` against `difficulty_based`, paired by seed.

Each run is GRPO of configs/quickstart on the first 256 training tasks, from the same warmed-up model (that of
`learns.py`), so that a task comes up several times and its estimated pass rate can matter. A run is stopped at the
first evaluated step whose greedy accuracy on the 400 test tasks reaches the target, and that step counts; a run that
never reaches it counts as one interval more than its last step, and is marked. Prints the steps of each run, and the
mean difference with its 95 % interval (Student's t over the seeds' differences).

Each finished run is a line of `--out`. Runs listed there are not repeated, so an interrupted benchmark continues, and
on a shared machine it can do a few runs at a time (`--runs`).

    python benchmarks/curriculum.py
    python benchmarks/curriculum.py --seeds 1 2 --steps 40
    python benchmarks/curriculum.py --out runs.jsonl --runs 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from learns import FOLDER as LEARNS
from learns import RECIPES, make_data, warm_model
from measured import BUILD, ROOT, trinity

FOLDER = BUILD / "curriculum"
TASKS = 256
EVERY = 4
"""Steps between evaluations."""
LOOK_SECONDS = 1.0
END_SECONDS = 120.0
SELECTORS = {
    "shuffle": "{selector_type: shuffle}",
    "difficulty_based": "{selector_type: difficulty_based, kwargs: {m: 8, tau: 0.1, do_sample: true}}",
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> 97.5 % quantile of Student's t."""


@dataclass(frozen=True)
class Run:
    """A run and its results."""

    selector: str
    seed: int
    target: float
    limit: int
    """Steps that it may take."""
    steps: int | None = None
    """The first evaluated step at the target; None: it was not reached."""
    accuracy: tuple[tuple[int, float], ...] = ()
    """(step, accuracy), as far as it went."""
    seconds: float = 0.0

    @property
    def counted(self) -> int:
        """Steps, of a run that did not reach the target one interval more than it had."""
        return self.limit + EVERY if self.steps is None else self.steps

    def same_as(self, other: Run) -> bool:
        """Whether both are the same measurement."""
        asked = ("selector", "seed", "target", "limit")
        return all(asdict(self)[name] == asdict(other)[name] for name in asked)


def main() -> None:
    """Make the runs that are missing, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=48, help="Steps that a run may take.")
    parser.add_argument("--target", type=float, default=0.85, help="Accuracy that is to be reached.")
    parser.add_argument("--out", type=Path, default=FOLDER / "runs.jsonl", help="The file of runs that have ended.")
    parser.add_argument("--runs", type=int, help="New runs at most; by default all that are missing.")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; what has ended is kept"))
    wanted = [Run(name, seed, args.target, args.steps) for seed in args.seeds for name in SELECTORS]
    missing = [run for run in wanted if not any(run.same_as(ended) for ended in read(args.out))]
    for run in missing[: args.runs]:
        ended = measured(run)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write(json.dumps(asdict(ended)) + "\n")
        print(said(ended), flush=True)
    report(wanted, read(args.out))


def read(path: Path) -> list[Run]:
    """The runs that have ended."""
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def said(run: Run) -> str:
    """A run in one line."""
    steps = f"more than {run.limit}" if run.steps is None else run.steps
    return f"seed {run.seed} {run.selector:16} {steps} steps to {run.target:.0%}, {run.seconds:.0f} s"


def report(wanted: Sequence[Run], ended: Sequence[Run]) -> None:
    """Print the runs that are wanted and have ended, and what they say of the difference."""
    chosen = {(run.selector, run.seed): run for run in ended if any(run.same_as(other) for other in wanted)}
    for run in chosen.values():
        print(said(run))
    seeds = [seed for seed in dict.fromkeys(run.seed for run in wanted) if all((s, seed) in chosen for s in SELECTORS)]
    counted = {name: [chosen[name, seed].counted for seed in seeds] for name in SELECTORS}
    if seeds:
        print("mean steps: " + ", ".join(f"{name} {statistics.mean(steps):.1f}" for name, steps in counted.items()))
        print("difficulty_based - shuffle: " + interval([b - a for a, b in zip(*counted.values(), strict=True)]))
    if lacking := len(wanted) - len(chosen):
        print(f"{lacking} of {len(wanted)} runs are missing")


def prepare() -> Path:
    """The data of `learns.py` with fewer training tasks."""
    make_data()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TASKS), ("test", None)):
        rows = (LEARNS / "data" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (FOLDER / f"{split}.jsonl").write_text("".join(rows[:count]))
    return FOLDER


def measured(run: Run) -> Run:
    """Make a run, and stop it once it has reached its target."""
    checkpoints, began = FOLDER / "checkpoints" / f"{time.time_ns()}", time.monotonic()
    data, model = prepare(), warm_model()
    command = [
        trinity(), "run", "--config", RECIPES["grpo"].config, f"name={run.selector}_{run.seed}",
        f"model.model_path={model}", "stages=[]", "cluster.gpu_per_node=0", f"seed={run.seed}",
        f"buffer.total_steps={run.limit}", f"explorer.eval_interval={EVERY}", f"trainer.save_interval={run.limit}",
        f"buffer.explorer_input.taskset.task_selector={SELECTORS[run.selector]}",
    ]  # fmt: skip
    environment = {"TRINITY_TASKSET_PATH": str(data), "TRINITY_CHECKPOINT_ROOT_DIR": str(checkpoints)}
    log = FOLDER / "run.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
    reached = False
    try:
        while process.poll() is None and not reached:
            time.sleep(LOOK_SECONDS)
            reached = any(accuracy >= run.target for _, accuracy in curve(checkpoints))
    finally:
        if process.poll() is None:
            process.terminate()  # the run saves and ends
            process.wait(END_SECONDS)
    if process.returncode and not reached:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-4000:]}")
    points = tuple(curve(checkpoints))
    steps = next((step for step, accuracy in points if accuracy >= run.target), None)
    return Run(run.selector, run.seed, run.target, run.limit, steps, points, round(time.monotonic() - began, 1))


def curve(checkpoints: Path) -> Iterator[tuple[int, float]]:
    """(step, accuracy) of the run below `checkpoints`, so far."""
    for path in checkpoints.glob("**/metrics.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for line in map(json.loads, lines):
            if line["source"] == "eval":
                yield line["step"], line["metrics"]["eval/test/accuracy"]


def interval(values: Sequence[float]) -> str:
    """The mean with its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) not in STUDENT:
        return f"{mean:+.1f} steps"
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.1f} steps, 95 % interval {mean - half:+.1f} to {mean + half:+.1f}, {len(values)} seeds"


if __name__ == "__main__":
    main()
