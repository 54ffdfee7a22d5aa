"""The small model learns in environments and over several turns, with the recipes in configs.

    python benchmarks/environments_learn.py [--only frozen_lake] [--steps 20]

`frozen_lake`, `blackjack`, `reasoning_gym` and `openenv` (with its server) are their recipes; `tools` solves word
problems with a calculator; `multi_turn` gives the quick start's problems a second attempt. Each begins with the warm-up
of its recipe, on examples with mistakes. Prints one line each: mean reward of the first and of the last fifth of the
steps with its standard error between steps, the best possible one, median seconds a step, and the whole time. The exit
code is 1 if a reward hardly rose, or by less than two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from learns import ANEW, REWARD
from measured import BUILD, ROOT, run, trinity

LEAST = 0.2
"""Share of what is missing from the best that a recipe must gain."""
SURE = 2.0
"""Standard errors by which it must rise."""
FOLDER = BUILD / "environments"
PORT = 8765
TRAIN = "buffer.explorer_input.taskset"


@dataclass(frozen=True)
class Way:
    """A recipe and the tasks that it is for."""

    config: str
    make: tuple[str, ...] = ()
    """Arguments that make the tasks of an environment; none: the word problems of `trinity tiny`."""
    overrides: tuple[str, ...] = ()
    server: str = ""
    """A script that serves the environment on `PORT`."""
    steps: int = 40
    best: float = 1.0
    """The reward of best play."""


SUMS = {
    "dataset": "basic_arithmetic",
    "config": {
        "max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_parentheses": False, "allow_negation": False,
    },
}  # fmt: skip

NIM = ("--args", json.dumps({"url": f"http://127.0.0.1:{PORT}", "observation_key": "text"}))


QUIET = ("--args", '{"show_rules": false}')
WAYS = {
    "frozen_lake": Way("configs/frozen_lake/frozen_lake.yaml", (*QUIET, "--examples", "1500")),
    "blackjack": Way(
        "configs/blackjack/blackjack.yaml", (*QUIET, "--train", "4096", "--examples", "6000"), steps=90, best=-0.047
    ),
    "reasoning_gym": Way(
        "configs/reasoning_gym/reasoning_gym.yaml",
        ("--args", json.dumps(SUMS), "--train", "256", "--examples", "3000", "--skill", "0.7"),
    ),
    "openenv": Way(
        "configs/openenv/openenv.yaml",
        (*NIM, "--actions", *"123", "--moves", "6", "--examples", "3000"),
        server="configs/openenv/nim_server.py",
    ),
    "tools": Way("configs/tools/tools.yaml"),
    "multi_turn": Way(
        "configs/quickstart/quickstart.yaml",
        overrides=(
            "name=multi_turn",
            f"{TRAIN}.default_workflow_type=multi_turn_workflow",
            f"{TRAIN}.workflow_args={{max_turns: 2}}",
            "model.max_prompt_tokens=160",
            "buffer.batch_size=16",
        ),
    ),
}


def main() -> None:
    """Run the chosen recipes and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, help="Steps of each; by default those of its recipe.")
    parser.add_argument("--seed", type=int, default=42, help="Seed of the runs; model and tasks stay the same.")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "model").exists():
        subprocess.run([trinity(), "tiny", "--out", str(FOLDER), "--seed", "1"], check=True, cwd=ROOT)
    failed = []
    for name in args.only:
        with served(WAYS[name].server):
            if not learns(name, WAYS[name], args.steps or WAYS[name].steps, args.seed):
                failed.append(name)
    sys.exit(f"did not learn: {', '.join(failed)}" if failed else 0)


@contextmanager
def served(script: str) -> Iterator[None]:
    """The server of an environment, from its start to its end; none without a script."""
    if not script:
        yield
        return
    server = subprocess.Popen([sys.executable, script, "--port", str(PORT)], cwd=ROOT)
    try:
        yield  # the environment waits for its server
    finally:
        server.kill()
        server.wait()


def learns(name: str, way: Way, steps: int, seed: int) -> bool:
    """Make the tasks, run the recipe and print its line."""
    began, tasks = time.monotonic(), FOLDER / (name if way.make else "data")
    if way.make:
        make = ["configs/environment_tasks.py", name, *way.make, "--out", str(tasks)]
        subprocess.run([sys.executable, *make], check=True, cwd=ROOT)
    places = {"TRINITY_TASKSET_PATH": str(tasks), "TRINITY_MODEL_PATH": str(FOLDER / "model")}
    length = (f"buffer.total_steps={steps}", f"seed={seed}")
    lines = run(way.config, FOLDER / "checkpoints", *length, *ANEW, *way.overrides, **places)
    trained = [line for line in lines if line["source"] == "trainer" and REWARD in line["metrics"]]
    rewards = [line["metrics"][REWARD] for line in trained]
    fifth = max(1, len(rewards) // 5)
    start, end = statistics.mean(rewards[:fifth]), statistics.mean(rewards[-fifth:])
    noises = [error(part) for part in (rewards[:fifth], rewards[-fifth:])]
    seconds = statistics.median(after["time"] - before["time"] for before, after in pairwise(trained))
    print(
        f"{name:13} {REWARD} {start:.3f} ± {noises[0]:.3f} -> {end:.3f} ± {noises[1]:.3f} of at best {way.best:.3f} "
        f"in {len(rewards)} steps of {seconds:.2f} s, {time.monotonic() - began:.0f} s with the warm-up",
        flush=True,
    )
    return rose(start, end, noises, way.best)


def rose(start: float, end: float, noises: Sequence[float], best: float) -> bool:
    """True if the reward rose by enough of what was missing, and by more than noise; `noises`: both standard errors."""
    rise = end - start
    return rise > LEAST * (best - start) and rise > SURE * math.hypot(*noises)


def error(rewards: list[float]) -> float:
    """The standard error of the mean of steps, each of other tasks."""
    return statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else float("nan")


if __name__ == "__main__":
    main()
