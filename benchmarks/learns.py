"""Each of six algorithms learns: its recipe from configs/, cut short, on the small model, through `trinity run`.

`sft` starts from random weights and lowers its loss. The others start from its model instead of each recipe's own
warm-up stage: `grpo`, `ppo`, `opmd` and `mix` raise the reward of their rollouts, `dpo` lowers its loss. Prints the
mean over the first and the last fifth of the steps. The exit code is 1 if one did not improve.

    python benchmarks/learns.py
    python benchmarks/learns.py --only ppo mix --steps 40
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from measured import BUILD, ROOT, newest, run, trinity

FOLDER = BUILD / "learns"
ANEW = ["continue_from_checkpoint=false", "buffer.explorer_input.eval_tasksets=[]", "cluster.gpu_per_node=0"]
"""Each run begins at step 0, makes no evaluations, and compares with others on the CPU."""
REWARD = "reward/mean"


@dataclass(frozen=True)
class Recipe:
    """A configuration and the metric that must improve."""

    config: str
    metric: str
    steps: int
    """Number of steps, fewer than the recipe has."""

    @property
    def rises(self) -> bool:
        """True if larger is better."""
        return self.metric == REWARD


RECIPES = {
    "sft": Recipe("configs/sft/sft.yaml", "actor/sft_loss", 150),
    "dpo": Recipe("configs/dpo/dpo.yaml", "actor/dpo_loss", 25),
    "grpo": Recipe("configs/quickstart/quickstart.yaml", REWARD, 25),
    "ppo": Recipe("configs/ppo/ppo.yaml", REWARD, 25),
    "opmd": Recipe("configs/opmd/opmd.yaml", REWARD, 25),
    "mix": Recipe("configs/mix/mix.yaml", REWARD, 25),
}


def main() -> None:
    """Run the chosen recipes and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, help="Steps of each but sft.")
    args = parser.parse_args()
    make_data()
    failed = []
    for name in args.only:
        steps = args.steps if args.steps and name != "sft" else RECIPES[name].steps
        model = FOLDER / "model" if name == "sft" else warm_model()
        if not learns(name, RECIPES[name], steps, model):
            failed.append(name)
    sys.exit(f"did not improve: {', '.join(failed)}" if failed else 0)


def make_data() -> None:
    """The small model and its data, made once."""
    if not (FOLDER / "data" / "dpo.jsonl").exists():
        subprocess.run([trinity(), "tiny", "--out", str(FOLDER), "--seed", "1"], check=True, cwd=ROOT)


def learns(name: str, recipe: Recipe, steps: int, model: Path) -> bool:
    """Run a recipe and print its metric at the start and the end."""
    began = time.monotonic()
    overrides = [f"name={name}", f"model.model_path={model}", f"buffer.total_steps={steps}", "stages=[]", *ANEW]
    lines = run(recipe.config, FOLDER / "checkpoints", *overrides, TRINITY_TASKSET_PATH=str(FOLDER / "data"))
    trained = [line["metrics"] for line in lines if line["source"] == "trainer"]
    values = [metrics[recipe.metric] for metrics in trained if recipe.metric in metrics]
    fifth = max(1, len(values) // 5)
    start, end = statistics.mean(values[:fifth]), statistics.mean(values[-fifth:])
    better = end > start if recipe.rises else end < start
    print(
        f"{name:5} {recipe.metric:15} {start:.4f} -> {end:.4f} in {len(values)} steps, "
        f"{time.monotonic() - began:.0f} s: {'learns' if better else 'DOES NOT LEARN'}",
        flush=True,
    )
    return better


def warm_model() -> Path:
    """The model that `sft` trained; runs `sft` if it is missing."""
    pattern = "checkpoints/*/sft*/global_step_*/actor/huggingface/*.safetensors"
    if not any(FOLDER.glob(pattern)):
        learns("sft", RECIPES["sft"], RECIPES["sft"].steps, FOLDER / "model")
    return newest(FOLDER, pattern).parent


if __name__ == "__main__":
    main()
