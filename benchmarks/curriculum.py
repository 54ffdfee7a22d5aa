"""Steps to a fixed accuracy on the small model's data: `shuffle` against `difficulty_based`, paired by seed.

Each run is GRPO of configs/quickstart on the first 256 training tasks, from the same warmed-up model (that of
`learns.py`), so that a task comes up several times and its estimated pass rate can matter. Counted is the first
evaluated step whose greedy accuracy on the 400 test tasks reaches the target; a run that never does counts with one
interval more than its last step, and is marked. Printed are the steps of each run, and the mean difference with its
95 % interval (Student's t over the seeds' differences). What has been run is kept: an interrupted benchmark goes on.

    python benchmarks/curriculum.py
    python benchmarks/curriculum.py --seeds 1 2 --steps 40
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from learns import FOLDER as LEARNS
from learns import RECIPES, make_data, warm_model
from measured import BUILD, run

FOLDER = BUILD / "curriculum"
TASKS = 256
EVERY = 5
"""Steps between evaluations."""
SELECTORS = {
    "shuffle": "{selector_type: shuffle}",
    "difficulty_based": "{selector_type: difficulty_based, kwargs: {m: 8, tau: 0.1, do_sample: true}}",
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> 97.5 % quantile of Student's t."""


def main() -> None:
    """Run what has not been run, and print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--target", type=float, default=0.9)
    args = parser.parse_args()
    data, model = prepare(), warm_model()
    found: dict[str, list[int]] = {name: [] for name in SELECTORS}
    for seed in args.seeds:
        for name in SELECTORS:
            curve = measure(name, seed, args.steps, data, model)
            steps, reached = steps_to(curve, args.target, args.steps)
            found[name].append(steps)
            print(f"seed {seed} {name:16} {steps if reached else f'more than {args.steps}'} steps", flush=True)
    differences = [b - a for a, b in zip(*found.values(), strict=True)]
    print(f"steps to {args.target:.0%}: " + ", ".join(f"{k} {statistics.mean(v):.1f}" for k, v in found.items()))
    print("difficulty_based - shuffle: " + interval(differences))


def prepare() -> Path:
    """The data of `learns.py` with fewer training tasks."""
    make_data()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = (LEARNS / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (FOLDER / "train.jsonl").write_text("".join(rows[:TASKS]))
    (FOLDER / "test.jsonl").write_text((LEARNS / "data" / "test.jsonl").read_text())
    return FOLDER


def measure(name: str, seed: int, steps: int, data: Path, model: Path) -> dict[int, float]:
    """Version -> accuracy of one run; read from a file if it was made before."""
    kept = FOLDER / f"{name}_{seed}_{steps}.json"
    if not kept.exists():
        lines = run(
            RECIPES["grpo"].config, FOLDER / "checkpoints", f"name={name}_{seed}", f"model.model_path={model}",
            "stages=[]", "continue_from_checkpoint=false", "cluster.gpu_per_node=0", f"seed={seed}",
            f"buffer.total_steps={steps}", f"explorer.eval_interval={EVERY}", f"trainer.save_interval={steps}",
            f"buffer.explorer_input.taskset.task_selector={SELECTORS[name]}", TRINITY_TASKSET_PATH=str(data),
        )  # fmt: skip
        curve = {line["step"]: line["metrics"]["eval/test/accuracy"] for line in lines if line["source"] == "eval"}
        kept.write_text(json.dumps(curve))
    return {int(step): accuracy for step, accuracy in json.loads(kept.read_text()).items()}


def steps_to(curve: dict[int, float], target: float, last: int) -> tuple[int, bool]:
    """The first evaluated step at the target, and whether there is one."""
    reached = [step for step, accuracy in sorted(curve.items()) if accuracy >= target]
    return (reached[0], True) if reached else (last + EVERY, False)


def interval(values: Sequence[float]) -> str:
    """The mean with its 95 % interval."""
    mean = statistics.mean(values)
    if len(values) not in STUDENT:
        return f"{mean:+.1f} steps"
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.1f} steps, 95 % interval {mean - half:+.1f} to {mean + half:+.1f}, {len(values)} seeds"


if __name__ == "__main__":
    main()
