"""Runs of a single trainer worker, and their outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from batches import make_batch

from trinity_core.config import Config
from trinity_core.exchange.tracking.metrics_file import read_metrics
from trinity_core.run.loop import train
from trinity_core.training.worker import TrainerWorker

STEPS = 4


def put(config: Config, steps: Iterable[int] = range(1, STEPS + 1)) -> None:
    """Store explore steps that all used version 0: a new trainer would drop rows of newer versions."""
    from trinity_core.exchange.store.run_store import open_run_store

    with open_run_store(config) as store:
        done = store.position("explorer").step
        for step in steps:
            if step > done:
                rows = make_batch(step)
                for row in rows:
                    row.versions = np.where(row.action_mask, 0, -1)
                store.put("explorer", step, {}, rows, 0)


def run(config: Config) -> dict[str, Any]:
    """Train to the end; return the result."""
    worker = TrainerWorker(config)
    worker.start()
    return worker.run(train)


def metrics(config: Config) -> list[dict[str, float]]:
    lines = map(json.loads, (config.job_dir / "monitor" / "metrics.jsonl").read_text().splitlines())
    return [
        {"step": line["step"]}
        | {k: v for k, v in line["metrics"].items() if not k.startswith(("timing_s/", "tokens_per_second"))}
        for line in lines
    ]


def tensors(config: Config, part: str, content: str) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint."""
    path = config.job_dir / f"global_step_{STEPS}" / part / f"{content}_world_size_1_rank_0.pt"
    return torch.load(path, weights_only=True)


def assert_same_runs(one: Config, other: Config, parts: Sequence[str] = ("actor",)) -> None:
    """Metrics and last checkpoints must be bit-identical."""
    assert metrics(one) == metrics(other)
    digests = [[line.weights for line in read_metrics(config.job_dir)] for config in (one, other)]
    assert digests[0] == digests[1] and len({*digests[0]}) == len(digests[0])
    for part in parts:
        for content in ("model", "optim"):
            ours, theirs = tensors(one, part, content), tensors(other, part, content)
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), (part, content)
