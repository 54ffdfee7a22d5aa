"""What a checkpoint costs the steps during which it is written: the wait at the end of a step, and the next steps.

A model with random weights is trained on the same rollouts. Rounds of steps with and without a save alternate. A step
may wait at most 10 % of its own time.

    python benchmarks/save_beside.py [--size large --rows 4 --rounds 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from training_part import rollouts

LIMIT = 0.1
SIZES = {"tiny": (), "small": (512, 1536, 8, 8, 4), "large": (1024, 4096, 18, 16, 8, 16_384)}
"""Fields of `TinySize`: 0.9, 20 and 270 million parameters."""


def savepoints_of(folder: Path, size: str) -> tuple:
    """A learner of a new model and its checkpoints."""
    from trinity_core.config import config_from_dict
    from trinity_core.data.tiny import TinySize, make_model
    from trinity_core.training.checkpoint import Savepoints
    from trinity_core.training.distributed import join, meeting_point
    from trinity_core.training.learner import Learner

    model = folder / "model"
    make_model(model, 0, TinySize(*SIZES[size]))
    ranks = join(0, 1, *meeting_point(), use_gpu=False)
    config = config_from_dict(
        {
            "name": "run", "mode": "train", "checkpoint_root_dir": str(folder),
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 1e-5}},
            "model": {"model_path": str(model), "max_prompt_tokens": 64, "max_response_tokens": 64},
            "cluster": {"gpu_per_node": 0},
            "trainer": {"max_checkpoints_to_keep": 1},
            "buffer": {"batch_size": 16, "total_steps": 1000, "trainer_input": {"experience_buffer": {"name": "b"}}},
        }
    )  # fmt: skip
    learner = Learner(config, 1000, ranks)
    return learner, Savepoints(config, ranks, learner.engine.module.lm)


def measure(learner: object, savepoints: object, rounds: int, count: int) -> dict[str, float]:
    """Median seconds: of a step alone, of one while a checkpoint is written, of its copy, and until it is whole."""
    rows = rollouts(learner.model_config.vocab_size)[:count]
    step, times = 0, {"alone": [], "beside": [], "copy": [], "write": []}

    def train(kind: str | None) -> None:
        nonlocal step
        step += 1
        began = time.perf_counter()
        learner.step(rows, step)
        if kind:
            times[kind].append(time.perf_counter() - began)

    for number in range(-1, rounds):
        for _ in range(3):
            train("alone" if number >= 0 else None)
        began = time.perf_counter()
        savepoints.save(learner, step, None)
        copied = time.perf_counter()
        while not savepoints.writer._written.done():
            train("beside" if number >= 0 else None)
        savepoints.writer.until_written()
        print(f"round {number}: copied in {copied - began:.2f} s", flush=True)  # the first pays for new memory
        if number >= 0:
            times["copy"].append(copied - began)
            times["write"].append(time.perf_counter() - copied)
    savepoints.writer.close()
    return {name: statistics.median(seconds) for name, seconds in times.items() if seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=128, help="rollouts of a step, of about 40 tokens each")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        learner, savepoints = savepoints_of(Path(folder), args.size)
        seconds = measure(learner, savepoints, args.rounds, args.rows)
        files = [file for file in savepoints.layout.root.glob("global_step_*/**/*") if file.is_file()]
        print(f"checkpoints of {sum(file.stat().st_size for file in files) / 1e6:.0f} MB")
    for name, value in seconds.items():
        print(f"{name:8}{value * 1e3:9.1f} ms {value / seconds['alone']:7.2f} steps")
    wait = seconds["copy"] / seconds["alone"]
    print(f"a step waits {wait:.1%} of itself (aim: at most {LIMIT:.0%})")
    return int(wait > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
