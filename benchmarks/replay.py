"""Are train steps of real runs repeated bit for bit? Random steps of small runs of every kind, replayed on the CPU.

    python benchmarks/replay.py                # 100 steps, about 15 minutes on 2 cores
    python benchmarks/replay.py --steps 20 --only killed,lora --keep FOLDER

The runs: synchronous; one step off; asynchronous; killed twice and resumed; an adapter with a reference; DPO. Prints
for each run how many of its steps gave the same loss, gradient norm, other metrics and weights; then the share of a
step that recording the digest takes.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from measured import ROOT

from trinity_core.data.tiny import TinyFolders, make_tiny
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.results.replay import Replay

sys.path.insert(0, str(ROOT / "tests" / "chaos"))
from killing import ChaosRun, Kill

STEPS = 16
SAVED = "trainer.save_interval=4"
ADAPTER = (
    "model.lora_configs=[{lora_rank: 4, lora_alpha: 16}]", "algorithm.kl_loss_fn=k2",
    "algorithm.kl_loss_fn_args={kl_coef: 0.01}",
)  # fmt: skip
DPO = ("mode=train", "algorithm.algorithm_type=dpo", "buffer.train_batch_size=16", "buffer.explorer_input=null")
KILLS = (Kill("trainer", 6, "saving"), Kill("explorer", 11))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps to replay, shared out over the runs")
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that are there are not made again")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        tiny = make_tiny(folder / "tiny", 0, 256, 16, 16, count_dpo=256)
        chosen = {name: run for name, run in runs(tiny).items() if not args.only or name in args.only.split(",")}
        rng, equal, costs = random.Random(args.seed), 0, list[float]()
        counts = [args.steps // len(chosen) + (i < args.steps % len(chosen)) for i in range(len(chosen))]
        for (name, (overrides, kills)), count in zip(chosen.items(), counts, strict=True):
            job = made(folder / name, tiny, overrides, kills)
            steps = [rng.randint(1, STEPS) for _ in range(count)]
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # each run has a plugin of the same name
                repeated = pool.submit(replayed, name, job, steps).result()
            print(f"{name:16} {repeated} of {count} equal", flush=True)
            equal += repeated
            costs.append(cost(job))
        print(f"{equal} of {args.steps} equal; recording takes at most {max(costs):.2%} of a step")
    sys.exit(equal < args.steps)


def runs(tiny: TinyFolders) -> dict[str, tuple[Sequence[str], Sequence[Kill]]]:
    """name → (overrides, kills)."""
    pairs = "format: {prompt_key: question, chosen_key: chosen, rejected_key: rejected}"
    preferences = f"{{name: pairs, path: {tiny.data}, split: dpo, {pairs}}}"
    return {
        "synchronous": ((), ()),
        "one_step_off": (("synchronizer.sync_offset=1",), ()),
        "asynchronous": (("synchronizer.sync_style=explorer_driven",), ()),
        "killed": ((), KILLS),
        "lora": (ADAPTER, ()),
        "dpo": ((*DPO, f"buffer.trainer_input.experience_buffer={preferences}"), ()),
    }


def made(folder: Path, tiny: TinyFolders, overrides: Sequence[str], kills: Sequence[Kill]) -> Path:
    run = ChaosRun(folder, tiny.model, tiny.data, STEPS, overrides=(SAVED, *overrides))
    if not (run.job / "summary.json").exists():
        with run:
            run.go(kills)
        assert len(run.killed) == len(kills), "the run ended before its kills"
    return run.job


def replayed(name: str, job: Path, steps: Sequence[int]) -> int:
    """Return how many of the steps were repeated exactly; print the others."""
    equal = 0
    with Replay(job) as replay:
        for step in steps:
            outcome = replay.step(step)
            equal += not outcome.differing
            if outcome.differing:
                print(f"{name}: {outcome.text()}")
    return equal


def cost(job: Path) -> float:
    """Return the median share of a step's time that the digest takes."""
    lines = [line.metrics for line in read_metrics(job) if line.source == "trainer"]
    return median(metrics["timing_s/digest"] / metrics["timing_s/step"] for metrics in lines)


if __name__ == "__main__":
    main()
