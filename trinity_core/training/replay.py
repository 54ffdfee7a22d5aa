"""One rank of a trainer that repeats train steps: `trinity_core.results.replay` starts it and gives it the batches."""

from __future__ import annotations

import gc
from typing import Any

import torch

from trinity_core.base.plugins import load_plugins
from trinity_core.config.schema import Config
from trinity_core.data.experience import from_bytes
from trinity_core.training.checkpoint import Savepoints
from trinity_core.training.distributed import join, meeting_point, uses_gpu
from trinity_core.training.learner import Learner
from trinity_core.training.state import weights_digest


class ReplayRank:
    """Loads what a trainer loads and takes its steps, but publishes, saves and writes nothing.

    All ranks are called at once. `threads`: CPU threads of torch, whose number may change the last bits of a sum.
    """

    def __init__(self, config: Config, rank: int, world_size: int, threads: int) -> None:
        load_plugins(config.plugin_dir)
        torch.set_num_threads(threads)
        self._config, self._rank, self._world_size = config, rank, world_size
        self._learner: Learner | None = None

    def rendezvous(self) -> list[Any]:
        """Return the address and port where the ranks meet. Called on rank 0."""
        return list(meeting_point())

    def load(self, step: int, total_steps: int, master: tuple[str, int]) -> None:
        """Restore the checkpoint of `step`, or for 0 the model that the run began with. Collective."""
        self._learner = None
        gc.collect()  # DeepSpeed's engines refer to themselves
        ranks = join(self._rank, self._world_size, *master, use_gpu=uses_gpu())
        torch.manual_seed(self._config.seed)
        self._learner = Learner(self._config, total_steps, ranks)
        if step:
            Savepoints(self._config, ranks, self._learner.engine.module.lm).load(self._learner, step)

    def take(self, step: int, rows: bytes) -> dict[str, Any]:
        """Take train step `step` on a batch; return its `metrics` and the digest of the `weights`. Collective."""
        assert self._learner is not None, "load comes before take"
        batch = from_bytes(rows) if rows else []
        metrics = self._learner.step(batch, step) if batch else {"skipped_step": 1.0}
        return {
            "metrics": {name: float(value) for name, value in metrics.items()},
            "weights": weights_digest(self._learner.engine),
        }
