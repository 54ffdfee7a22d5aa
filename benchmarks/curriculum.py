"""Steps to a fixed accuracy on the small model's data: `shuffle` against `difficulty_based`, paired by seed.

Each run is GRPO of configs/quickstart on the first 256 training tasks, from the same warmed-up model (that of
`learns.py`), so that a task comes up several times and its estimated pass rate can matter. What counts is the first
evaluated step whose greedy accuracy on the 400 test tasks reaches the target; a run that never reaches it counts as one
interval more than its last step. Prints the steps of each run, and the mean difference with its 95 % interval
(Student's t over the seeds' differences).

    python benchmarks/curriculum.py
    python benchmarks/curriculum.py --seeds 1 2 --steps 40
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from learns import FOLDER as LEARNS
from learns import RECIPES, make_data, warm_model
from measured import BUILD, run
from scipy.stats import t

FOLDER = BUILD / "curriculum"
TASKS = 256
EVERY = 4
"""Steps between evaluations."""
SELECTORS = {
    "shuffle": "{selector_type: shuffle}",
    "difficulty_based": "{selector_type: difficulty_based, kwargs: {m: 8, tau: 0.1, do_sample: true}}",
}


def main() -> None:
    """Make the runs and print what they say of the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=48, help="Steps of each run.")
    parser.add_argument("--target", type=float, default=0.85, help="Accuracy that is to be reached.")
    args = parser.parse_args()
    make_data()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", TASKS), ("test", None)):
        rows = (LEARNS / "data" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (FOLDER / f"{split}.jsonl").write_text("".join(rows[:count]))
    model, steps = warm_model(), dict[tuple[str, int], int]()
    for seed in args.seeds:
        for name in SELECTORS:
            steps[name, seed] = steps_to(args.target, name, seed, args.steps, model)
            print(f"seed {seed} {name:16} {steps[name, seed]} steps to {args.target:.0%}", flush=True)
    for name in SELECTORS:
        print(f"{name}: mean {statistics.mean(steps[name, seed] for seed in args.seeds):.1f} steps")
    gains = [steps["difficulty_based", seed] - steps["shuffle", seed] for seed in args.seeds]
    mean = statistics.mean(gains)
    if len(gains) > 1:
        half = t.ppf(0.975, len(gains) - 1) * statistics.stdev(gains) / len(gains) ** 0.5
        print(f"difference: {mean:+.1f} steps, 95 % interval {mean - half:+.1f} to {mean + half:+.1f}")


def steps_to(target: float, name: str, seed: int, limit: int, model: Path) -> int:
    """The first evaluated step of a run at the target; one interval beyond `limit` if there is none."""
    lines = run(
        RECIPES["grpo"].config, FOLDER / "checkpoints", f"name={name}_{seed}", f"model.model_path={model}", "stages=[]",
        "cluster.gpu_per_node=0", "continue_from_checkpoint=false", f"seed={seed}", f"buffer.total_steps={limit}",
        f"explorer.eval_interval={EVERY}", f"trainer.save_interval={limit}",
        f"buffer.explorer_input.taskset.task_selector={SELECTORS[name]}", TRINITY_TASKSET_PATH=str(FOLDER),
    )  # fmt: skip
    evaluated = {line["step"]: line["metrics"]["eval/test/accuracy"] for line in lines if line["source"] == "eval"}
    return min((step for step, accuracy in evaluated.items() if accuracy >= target), default=limit + EVERY)


if __name__ == "__main__":
    main()
