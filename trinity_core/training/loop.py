"""The trainer's loop: draw a batch, update, publish, save. Every rank runs it in step with the others.

Version n is the weights after step n. Rank 0 draws and writes; what it drew, and whether to stop, reaches the others in
one message a step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from threading import Event

import torch

from trinity_core.config.schema import Config
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.layout import JobLayout
from trinity_core.timing import StepTimer
from trinity_core.tracking.metrics_file import MetricsFile
from trinity_core.training.distributed import Ranks, any_rank, broadcast_bytes
from trinity_core.training.learner import Learner
from trinity_core.training.publish import Publisher
from trinity_core.training.savepoints import Savepoints
from trinity_core.training.sources import BatchSource

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a trainer is; JSON."""

    step: int = 0
    total_steps: int = 0
    state: str = "starting"
    """starting, waiting (for a batch), training, publishing, saving, done, stopped."""
    saved_step: int = 0
    metrics: dict[str, float] | None = None
    """Those of the last step."""


class Loop:
    """Steps from where the trainer stands to `total_steps`."""

    def __init__(
        self, config: Config, learner: Learner, ranks: Ranks, source: BatchSource | None, publisher: Publisher | None,
        savepoints: Savepoints, progress: Progress, stopping: Event,
    ) -> None:  # fmt: skip
        self.learner = learner
        self.ranks = ranks
        self.source = source
        self.publisher = publisher
        self.savepoints = savepoints
        self.progress = progress
        self.stopping = stopping
        self.save_interval = config.trainer.save_interval
        self.metrics = MetricsFile(JobLayout(config.job_dir).root, "trainer") if ranks.first else None

    def run(self) -> dict[str, object]:
        """Train until the last step, until no more data comes, or until asked to stop; save; return a summary."""
        progress = self.progress
        why = "finished"
        while progress.step < progress.total_steps:
            watch = StepTimer()
            start = time.perf_counter()
            with watch.part("wait"):
                progress.state = "waiting"
                batch = self._draw(progress.step + 1)
            if batch is None:
                why = "stopped" if any_rank(self.stopping.is_set(), self.ranks) else "no more experiences"
                break
            self._step(batch, watch, start)
        with torch.no_grad():
            if progress.saved_step != progress.step:
                self._save()
        progress.state = "stopped" if why == "stopped" else "done"
        if why == "no more experiences" and self.ranks.first:
            log.warning("the explorers finished; training ends at step %d of %d", progress.step, progress.total_steps)
        return {
            "step": progress.step,
            "total_steps": progress.total_steps,
            "ended": why,
            "stopped": why == "stopped",
            "checkpoint": str(self.savepoints.layout.step(progress.saved_step)),
            "metrics": progress.metrics or {},
        }

    def _step(self, batch: list[Experience], watch: StepTimer, start: float) -> None:
        progress = self.progress
        progress.state = "training"
        step = progress.step + 1
        metrics = self.learner.step(batch, step) if batch else {"skipped_step": 1.0}
        progress.metrics, progress.step = metrics, step
        if self.publisher is not None and self.publisher.due(step):
            progress.state = "publishing"
            with watch.part("publish"):
                self.publisher.publish(step)
        if step == progress.total_steps or (self.save_interval and step % self.save_interval == 0):
            with watch.part("save"):
                self._save()
        metrics |= watch.seconds | {"timing_s/step": time.perf_counter() - start}
        progress.metrics = metrics
        if self.metrics is not None:
            self.metrics.write(step, metrics)

    def _draw(self, step: int) -> list[Experience] | None:
        """The batch of `step` on every rank; None: stop."""
        if any_rank(self.stopping.is_set(), self.ranks):
            return None
        drawn = self.source.draw(step, self.stopping.is_set) if self.source is not None else None
        if self.ranks.world_size == 1:
            return drawn
        if self.ranks.first:
            broadcast_bytes(b"" if drawn is None else to_bytes(drawn), self.ranks)
            return drawn
        message = broadcast_bytes(None, self.ranks)
        return from_bytes(message) if message else None

    def _save(self) -> None:
        """A checkpoint of the present step, named only when it and all it builds on are on the disk. Collective."""
        self.progress.state = "saving"
        if self.source is not None:
            self.source.before_save(self.progress.step)
        self.savepoints.save(self.learner, self.progress.step, self.publisher)
        self.progress.saved_step = self.progress.step
        if self.source is not None:
            self.source.commit(self.progress.step, self.savepoints.oldest())


def as_json(progress: Progress) -> dict[str, object]:
    """For other processes."""
    return asdict(progress)
