"""Wall time of synchronous and asynchronous runs against what is possible: max(explore, train) + sync.

    python benchmarks/async_overlap.py            # engines and trainer only sleep: measures the scheduling
    python benchmarks/async_overlap.py --real     # the small model, vLLM and DeepSpeed on this machine

Sleeping: explorer, loops, store and weights are real; the engine sleeps before it answers, and an update is a sleep.
`explore` and `train` are the seconds slept, `sync` those of publishing and loading. The floor of a synchronous run is
their sum (`in turn`), that of an asynchronous one max(explore, train) + sync; the aim is 0.95 of it (`floor/wall`).
Answers are all of one length, or lognormal: a step lasts as long as its longest answer. With a bound on staleness no
scheduler reaches that floor then, because one side runs out of work while the other has a long step: `path/wall` is the
least time that the style allows for these very steps, also to be 0.95 of the wall time.

Real: explore and train are the seconds for which each side works while the other side works too, each on its share of
the cores, so that the ratio shows the cost of waiting and not of competition for cores; the aim is 0.85. Compare the
seconds per step between the rows to see what overlap gains on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measured import TINY, WARM_UP_STEPS, by_source, make_tiny, run_rft

from trinity_core.config import Config, config_from_dict
from trinity_core.config.sync_schedule import SyncSchedule
from trinity_core.exchange.sync.versions import open_versions, run_versions
from trinity_core.rollout.explorer import Explorer
from trinity_core.rollout.inference.requests import Sample, SampleBatch, WeightSyncReport
from trinity_core.run.loop import explore, train
from trinity_core.training.sources import RolloutSource

STYLES = {
    "synchronous": {"sync_style": "fixed"},
    "fixed, offset 1": {"sync_style": "fixed", "sync_offset": 1},
    "explorer_driven": {"sync_style": "explorer_driven"},
    "trainer_driven": {"sync_style": "trainer_driven"},
    "the same, max_staleness 1": {"sync_style": "trainer_driven", "max_staleness": 1},
    "the same, max_staleness 4": {"sync_style": "trainer_driven", "max_staleness": 4},
}
LENGTHS = ("even", "heavy tail")
ANSWER = np.array([5, 6], dtype=np.int32)


def least_time(explored: Sequence[float], trained: Sequence[float], ahead: int | None) -> float:
    """Seconds of a run whose steps take these seconds, loading and publishing included, if nothing else takes time.

    A train step needs the explore step of its number; an explore step the train step `ahead` + 1 before it, if any.
    """
    ends: list[float] = []
    explorer = trainer = 0.0
    for step, (exploring, training) in enumerate(zip(explored, trained, strict=True)):
        needed = -1 if ahead is None else step - 1 - ahead
        explorer = max(explorer, ends[needed] if needed >= 0 else 0.0) + exploring
        trainer = max(trainer, explorer) + training
        ends.append(trainer)
    return trainer


def steps_ahead(synchronizer: Mapping[str, Any]) -> int | None:
    """Explore steps that may begin before the weights of the train step before them are there; None: any number."""
    if synchronizer["sync_style"] == "fixed":
        return int(synchronizer.get("sync_offset", 0))
    bound: int | None = synchronizer.get("max_staleness")
    return bound


@dataclass
class SleepingEngine:
    """An engine whose answers take `seconds`, or a lognormal multiple of it with the same mean of a step's longest."""

    seconds: float
    tail: bool
    scale: float = 1.0
    slept: list[float] = field(default_factory=list)
    """Seconds of each explore step."""
    loading: list[float] = field(default_factory=lambda: [0.0])
    """Seconds of the loads before each explore step and after the last one."""
    version: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    async def start(self) -> float:
        return 0.0

    async def generate(self, requests: Sequence[Any]) -> SampleBatch:
        began, version = time.perf_counter(), self.version
        await asyncio.sleep(self.seconds * self._longest(len(requests)))
        self.slept.append(time.perf_counter() - began)
        self.loading.append(0.0)
        ones = np.ones(len(ANSWER), np.int32)
        return SampleBatch.pack([Sample(ANSWER, -ones.astype(np.float32), version * ones, "stop") for _ in requests])

    def _longest(self, count: int) -> float:
        return float(self.random.lognormal(0.0, 1.0, count).max()) / self.scale if self.tail else 1.0

    async def abort(self, keys: Sequence[str]) -> None:
        """Nothing is given up."""

    async def load(self, source: Any, version: int) -> WeightSyncReport:
        began = time.perf_counter()
        for _ in open_versions(source.method, Path(source.path)).load(version):
            """Map every tensor."""
        self.version = version
        seconds = time.perf_counter() - began
        self.loading[-1] += seconds
        return WeightSyncReport(version, seconds, None)

    async def sampled(self) -> int:
        return len(self.slept)

    async def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    async def stop(self) -> None:
        """Nothing runs."""


class SleepingTrainer:
    """The verbs of the trainer's loop with the real store and weights; an update is a sleep."""

    def __init__(self, config: Config, seconds: float) -> None:
        self.config, self.seconds, self.step = config, seconds, 0
        self.source, self.versions = RolloutSource(config, None), run_versions(config)
        self.schedule = SyncSchedule.of(config)
        self.slept: list[float] = []
        self.publishing = [0.0]
        """Seconds of publishing after each train step; the first stands for the initial weights."""
        self.staleness: list[int] = []
        self.source.rewind(0)
        self.publish(0)

    def next_batch(self) -> Any:
        if self.step == self.config.buffer.total_steps:
            return None
        return self.source.draw(self.step + 1, lambda: False, lambda _: None)

    def update(self, batch: Sequence[Any]) -> None:
        self.staleness += [self.step - row.newest_version for row in batch]
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.slept.append(time.perf_counter() - began)
        self.publishing.append(0.0)
        self.step += 1

    def publish_if_due(self) -> None:
        if self.schedule.publishes_after(self.step):
            self.publish(self.step)

    def publish(self, version: int) -> None:
        import torch

        began = time.perf_counter()
        self.versions.publish(version, [("weight", torch.zeros(1 << 18))])
        self.publishing[-1] += time.perf_counter() - began

    def save_if_due(self) -> None:
        """Nothing is saved."""

    def write_metrics(self) -> None:
        """Nothing is written."""

    def finish(self) -> None:
        """Nothing is left to do."""


def configuration(folder: Path, steps: int, synchronizer: dict[str, Any]) -> Config:
    """A run of `steps` steps of 8 tasks with 4 answers each."""
    columns = {"prompt_key": "question", "response_key": "answer"}
    return config_from_dict({
        "project": "benchmarks",
        "name": "overlap",
        "checkpoint_root_dir": str(folder),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "model": {"model_path": str(TINY / "model"), "max_model_len": 256},
        "cluster": {"gpu_per_node": 0},
        "buffer": {
            "batch_size": 8,
            "total_steps": steps,
            "explorer_input": {"taskset": {"path": str(TINY / "data"), "split": "train", "format": columns}},
        },
        "explorer": {"eval_interval": 0, "eval_on_startup": False, "runner_per_model": 8},
        "synchronizer": {"sync_method": "memory", **synchronizer},
    })  # fmt: skip


async def sleeping_run(folder: Path, name: str, tail: bool, args: argparse.Namespace) -> dict[str, float]:
    """One run of a style: seconds by part, and the staleness of its rows."""
    config = configuration(folder, args.steps, STYLES[name])
    random = np.random.default_rng(1)
    scale = float(np.mean([random.lognormal(0.0, 1.0, 32).max() for _ in range(2000)]))
    engine = SleepingEngine(args.seconds, tail, scale)
    explorer, trainer = Explorer(config, [engine]), SleepingTrainer(config, args.seconds)
    await explorer.prepare()
    began = time.perf_counter()
    await asyncio.gather(explorer.run(explore), asyncio.to_thread(train, trainer))
    wall = time.perf_counter() - began
    await explorer.close()
    trainer.versions.remove()
    loading, publishing = engine.loading[:-1], trainer.publishing[1:]
    least = least_time(added(engine.slept, loading), added(trainer.slept, publishing), steps_ahead(STYLES[name]))
    shares = parts(sum(engine.slept), sum(trainer.slept), sum(loading) + sum(publishing), wall)
    return shares | {"path/wall": least / wall, "staleness": float(max(trainer.staleness))}


def added(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [one + other for one, other in zip(first, second, strict=True)]


def parts(explored: float, trained: float, sync: float, wall: float) -> dict[str, float]:
    """The two floors of a run, and how near it came to them."""
    overlapping, in_turn = max(explored, trained) + sync, explored + trained + sync
    return {
        "explore": explored, "train": trained, "sync": sync, "wall": wall,
        "floor/wall": overlapping / wall, "in turn": in_turn / wall, "path/wall": math.nan,
    }  # fmt: skip


def real_run(name: str, tail: bool, args: argparse.Namespace) -> dict[str, float]:
    """A run on real parts: seconds by part of the steps after the warm-up, and the staleness of its rows."""
    settings = [f"synchronizer.{key}={value}" for key, value in STYLES[name].items()]
    sizes = ["explorer.rollout_model.engine_num=1", "trainer.worker_num=1", f"buffer.total_steps={args.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        lines = run_rft(Path(folder), *settings, *sizes, *(long_answers(Path(folder)) if tail else ()))
    explorer, trainer = by_source(lines, "explorer"), by_source(lines, "trainer")
    begin = next(line["time"] for line in lines if line["source"] == "trainer" and line["step"] == WARM_UP_STEPS)

    def spent(lines: dict[int, dict[str, Any]], *names: str) -> float:
        return sum(line["metrics"].get(f"timing_s/{name}", 0.0) for line in lines.values() for name in names)

    sync = spent(explorer, "weight_sync") + spent(trainer, "publish")
    explored = spent(explorer, "step") - spent(explorer, "wait", "weight_sync")
    trained = spent(trainer, "step") - spent(trainer, "wait", "publish")
    wall = max(line["time"] for line in trainer.values()) - begin
    staleness = max(line["metrics"]["staleness/max"] for line in trainer.values())
    return parts(explored, trained, sync, wall) | {"staleness": staleness}


def long_answers(folder: Path) -> list[str]:
    """Overrides by which one task in eight has answers of 200 tokens, the others of 20."""
    rows = (TINY / "data" / "train.jsonl").read_text().splitlines()
    shared = "format: {prompt_key: question, response_key: answer}, default_workflow_type: math_workflow"
    tasksets = []
    for name, part, tokens in (("short", rows[len(rows) // 8 :], 20), ("long", rows[: len(rows) // 8], 200)):
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(part) + "\n")
        tasksets.append(f"{{name: {name}, path: {path}, {shared}, rollout_args: {{max_tokens: {tokens}}}}}")
    return [
        "buffer.explorer_input.taskset=null",
        f"buffer.explorer_input.tasksets=[{', '.join(tasksets)}]",
        "model.max_response_tokens=200",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="run real parts instead of sleeping ones")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=0.4, help="of an explore step, and of an update, asleep")
    parser.add_argument("--only", choices=STYLES, action="append", help="a style (default: all)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each kind; the median is printed")
    args = parser.parse_args()
    make_tiny()
    columns = ["explore", "train", "sync", "wall", "floor/wall", "in turn", "path/wall", "staleness"]
    print(f"{'':26}{'answers':>11}" + "".join(f"{column:>11}" for column in columns))
    for tail in (False, True):
        for name in args.only or STYLES:
            rows = []
            for _ in range(args.repeat):
                with tempfile.TemporaryDirectory() as folder:
                    sleeping = sleeping_run(Path(folder), name, tail, args) if not args.real else None
                    rows.append(asyncio.run(sleeping) if sleeping is not None else real_run(name, tail, args))
            median = [statistics.median(row[column] for row in rows) for column in columns]
            print(f"{name:26}{LENGTHS[tail]:>11}" + "".join(f"{number:11.3f}" for number in median), flush=True)


if __name__ == "__main__":
    main()
