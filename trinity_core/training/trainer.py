"""The trainer: draws a batch, updates, publishes, saves. The loop over these calls is `trinity_core.run.loop.train`.

Version n is the weights after step n. Every rank makes the same calls in the same order; rank 0 draws and writes. One
message a step sends its batch, and whether to stop, to the other ranks.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from threading import Event
from typing import Any

import torch

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.base.files import read_json
from trinity_core.base.plugins import load_plugins
from trinity_core.base.timing import StepTimer
from trinity_core.config import to_dict
from trinity_core.config.engine_args import is_lossy
from trinity_core.config.resolve import held_out
from trinity_core.config.schema import Config
from trinity_core.config.training import dtype_of
from trinity_core.data.experience import Experience, from_bytes, to_bytes
from trinity_core.exchange.checkpoints.beginning import model_name
from trinity_core.exchange.checkpoints.resume import update_meta
from trinity_core.exchange.sync.shared_gpu import SharedGpu
from trinity_core.exchange.sync.versions import run_versions
from trinity_core.exchange.tracking import metrics_file
from trinity_core.exchange.tracking.pauses import pause_steps
from trinity_core.exchange.tracking.progress import LoggedMetrics
from trinity_core.training.checkpoint import Savepoints
from trinity_core.training.distributed import Ranks, any_rank, broadcast_bytes, join, uses_gpu
from trinity_core.training.engine import fits_beside_engine, free_cached
from trinity_core.training.learner import Learner
from trinity_core.training.publish import Publisher, policy_weights, trainer_rank
from trinity_core.training.sources import BatchSource, open_source, total_steps
from trinity_core.training.state import optimizer_steps, weights_digest

log = logging.getLogger(__name__)
MAX_FIRST_GAP = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.1, "fp8": 0.3}
"""Largest plausible mean |log pi - log mu| of a token, in nats, by the coarser number format of engine and trainer.
Kernels with different rounding differ by 1e-5 in float32, 0.01 in bfloat16; a wrong temperature, chat template or
tensor by 0.3 and more."""
NO_SIGNAL_WARNING = (
    "all rollouts of the %d groups trained on so far have the advantage 0: rewards do not differ within a group, so "
    "the policy learns nothing from them. Look at the sampled rollouts (`trinity view`) and at the reward function; "
    "one that ranks a group's answers sees no others, because it is called with one answer at a time."
)


@dataclass
class Progress:
    """A trainer's progress; JSON-serialisable."""

    step: int = 0
    total_steps: int = 0
    state: str = "starting"
    """starting, waiting (for a batch), training, publishing, saving, done, paused, stopped."""
    saved_step: int = 0
    metrics: dict[str, float] | None = None
    """Replaced, never changed: another thread reads it."""
    waits: str = ""
    """Text that says what it waits for; "" if nothing, or not for long."""


FEW_GROUPS = 8
"""Number of groups that may all have equal rewards by chance."""


@dataclass
class RewardSignal:
    """Detects a run whose rewards never differ within a group, so that every advantage is 0."""

    groups: int = 0
    """Groups trained on by this process."""
    is_absent: bool = True
    """True if no rollout of the run has had a nonzero advantage. False after a resume: earlier steps are unknown."""

    def note(self, batch: list[Experience], metrics: Mapping[str, float]) -> None:
        """Add a step's metrics. Logs one warning if the signal is absent after `FEW_GROUPS` groups."""
        if "advantages/zero_rows" not in metrics:
            return
        judged = {row.group for row in batch if not row.is_expert and not row.is_unscored}
        earlier_groups, self.groups = self.groups, self.groups + len(judged)
        self.is_absent &= metrics["advantages/zero_rows"] == 1.0
        if earlier_groups < FEW_GROUPS <= self.groups and self.flat_groups:
            log.warning(NO_SIGNAL_WARNING, self.groups)

    @property
    def flat_groups(self) -> int:
        """Return the number of groups trained on if all advantages were 0 and that is unlikely to be chance; else 0."""
        return self.groups if self.is_absent and self.groups >= FEW_GROUPS else 0


class Trainer:
    """One rank of a trainer that is ready for the step after `progress.step`."""

    def __init__(
        self, config: Config, learner: Learner, ranks: Ranks, source: BatchSource, publisher: Publisher | None,
        savepoints: Savepoints, progress: Progress, stopping: Event, gpu: SharedGpu | None = None,
    ) -> None:  # fmt: skip
        """`gpu`: the GPU shared with an engine, if any; held by the trainer now."""
        self.learner = learner
        self.ranks = ranks
        self.source = source
        self.publisher = publisher
        self.savepoints = savepoints
        self.progress = progress
        self.stopping = stopping
        self._gpu = gpu
        self._is_offloaded = False
        self._config = config
        self.save_interval = config.trainer.save_interval
        self._metrics_file = LoggedMetrics(config.job_dir, "trainer") if ranks.first else None
        self._ended = "finished"
        self._pauses = pause_steps(config, progress.step)
        self._fault: TransientFault | None = None
        """The fault that ended a wait for a batch or the GPU; earlier steps are saved."""
        self._untrained: int | None = None
        self._explorers: dict[str, dict[str, Any]] = {}
        self._timer = StepTimer()
        self._copied_step = progress.step
        """Step of the last checkpoint copied; it may still be being written."""
        self._is_updated = False
        """True if the policy is known to differ from the one the run began with."""
        self._signal = RewardSignal(is_absent=progress.step == 0)
        self._since: float | None = None
        """Time when the last step's metrics were written, or when the loop began."""

    def next_batch(self) -> list[Experience] | None:
        """Return the batch of the next step on every rank (empty: the step is skipped).

        The engine may take the shared GPU during a wait. Returns None after the last step, at a step of
        `monitor.pause.after_steps`, when the explorers have finished, when asked to stop, and after a `TransientFault`,
        which `finish` raises. Raises the error of a checkpoint that could not be written.
        """
        self.savepoints.writer.check()
        if self.progress.step >= self.progress.total_steps:
            return None
        if self.progress.step in self._pauses:
            self._ended = "paused"
            return None
        self._since = self._since or time.perf_counter()
        self.progress.state = "waiting"
        with self._timer.part("wait"):
            batch = self._draw(self.progress.step + 1)
        if batch is not None and not self._acquire_gpu():
            batch = None
        self.savepoints.writer.check()
        if batch is None:
            is_stopped = any_rank(self.stopping.is_set() or self._fault is not None, self.ranks)
            self._ended = "stopped" if is_stopped else "no more experiences"
        return batch

    def update(self, batch: list[Experience]) -> None:
        progress = self.progress
        progress.state = "training"
        step = progress.step + 1
        self._is_updated = self._is_updated or any_rank(optimizer_steps(self.learner.engine) > 0, self.ranks)
        progress.metrics = self.learner.step(batch, step) if batch else {"skipped_step": 1.0}
        if not self._is_updated:
            check_first_gap(progress.metrics, step, self._config, self.ranks.device.type == "cuda")
        if self.ranks.first:
            self.source.record_advantages(step, self.learner.advantages if batch else ())
            self._signal.note(batch, progress.metrics)
        progress.step = step
        if self._gpu is not None:
            self._gpu.tell_progress()

    def measure_if_due(self) -> None:
        """Measure the loss of held-out data every `eval_interval` steps and after the last one."""
        step, every = self.progress.step, self._config.explorer.eval_interval
        if step != self.progress.total_steps and not (every and step % every == 0):
            return
        for key, buffer in held_out(self._config).items():
            with self._timer.part("eval"):
                rows = self._shared(self.source.held_out(key)) or []
                measured = {
                    f"eval/{buffer.name}/{name}": value for name, value in self.learner.measure(rows, step).items()
                }
            self.progress.metrics = (self.progress.metrics or {}) | measured

    def publish_if_due(self) -> None:
        """Publish the weights every `sync_interval` steps (`explorer_driven`: every step) if an explorer loads them."""
        if self.publisher is not None and self.publisher.due(self.progress.step):
            self.progress.state = "publishing"
            with self._timer.part("publish"):
                self.publisher.publish(self.progress.step)

    def write_metrics(self) -> None:
        """Write the step's metrics and timings.

        Called before the step's checkpoint is saved: a run that resumes from that checkpoint does not repeat the step.
        """
        with self._timer.part("digest"):
            weights = weights_digest(self.learner.engine)
        now = time.perf_counter()
        seconds = self._timer.seconds | {"timing_s/step": now - (self._since or now)}
        self._timer, self._since = StepTimer(), now
        metrics = (self.progress.metrics or {}) | seconds
        at_work = seconds["timing_s/step"] - seconds.get("timing_s/wait", 0.0)
        if (tokens := metrics.get("experience/tokens")) and at_work > 0:
            metrics["tokens_per_second"] = tokens / at_work
        self.progress.metrics = metrics
        if self._metrics_file is not None:
            self.progress.metrics = self.progress.metrics | self._by_explorer()
            self._metrics_file.write(
                self.progress.step, self.progress.metrics, total_steps=self.progress.total_steps, weights=weights,
                updates=optimizer_steps(self.learner.engine),
            )  # fmt: skip

    def save_if_due(self) -> None:
        """Save a checkpoint every `save_interval` steps and after the last one; it is written in the background."""
        step = self.progress.step
        if step == self.progress.total_steps or (self.save_interval and step % self.save_interval == 0):
            with self._timer.part("save"):
                self._save()

    def finish(self) -> None:
        """Save the last step, unless it is saved, and record why training ends and how many rows are left.

        Waits for the checkpoint to be written. Raises the `TransientFault` that ended a wait.
        """
        progress = self.progress
        if self._copied_step != progress.step:
            with torch.no_grad():
                self._save()
        self.savepoints.writer.close()
        progress.saved_step = progress.step
        progress.state = self._ended if self._ended in ("stopped", "paused") else "done"
        if progress.state == "done":
            self._untrained = self.source.untrained_rows()
        self._explorers = {name: asdict(contribution) for name, contribution in self.source.contributions().items()}
        if self._ended == "no more experiences" and self.ranks.first:
            self.source.end()
            log.warning("the explorers finished; training ends at step %d of %d", progress.step, progress.total_steps)
        if self._signal.flat_groups:
            log.warning(NO_SIGNAL_WARNING, self._signal.flat_groups)
        self._release_gpu()
        if self._fault is not None:
            raise self._fault

    def present(self) -> AbstractContextManager[None]:
        """A context in which explorers know that the trainer is at work."""
        return self.source.present(self.progress.total_steps)

    def summary(self) -> dict[str, object]:
        """Return step, total_steps, ended (why), stopped, checkpoint (its folder) and metrics (of the last step).

        `untrained_rows` are left in the queue for good; None if training will be resumed. `explorers` has rows and
        staleness of all batches, by explorer. `flat_groups` is the number of groups trained on if all their advantages
        were 0.
        """
        progress = self.progress
        return {
            "step": progress.step,
            "total_steps": progress.total_steps,
            "ended": self._ended,
            "stopped": self._ended == "stopped",
            "untrained_rows": self._untrained,
            "explorers": self._explorers,
            "flat_groups": self._signal.flat_groups,
            "checkpoint": str(self.savepoints.layout.step(progress.saved_step)),
            "metrics": progress.metrics or {},
        }

    def _draw(self, step: int) -> list[Experience] | None:
        """Return the batch of `step` on every rank; None to stop."""
        if any_rank(self.stopping.is_set(), self.ranks):
            return None
        drawn = None
        try:
            drawn = self.source.draw(step, self._without_batch, self._tell)
        except TransientFault as fault:
            self._fault = fault
        self.progress.waits = ""
        return self._shared(drawn)

    def _shared(self, rows: list[Experience] | None) -> list[Experience] | None:
        """Return the rows of rank 0 on every rank."""
        if self.ranks.world_size == 1:
            return rows
        if self.ranks.first:
            broadcast_bytes(b"" if rows is None else to_bytes(rows), self.ranks)
            return rows
        message = broadcast_bytes(None, self.ranks)
        return from_bytes(message) if message else None

    def _without_batch(self) -> bool:
        """Called repeatedly while there is no batch: release the GPU; True to stop waiting."""
        self._release_gpu()
        return self._stops()

    def _acquire_gpu(self) -> bool:
        """Wait for the engine to release a shared GPU; False if stopped or timed out."""
        if self._gpu is None or self._gpu.held:
            return True
        acquired = False
        try:
            with self._timer.part("wait"):
                acquired = self._gpu.acquire(self._config.synchronizer.sync_timeout, self._stops, self._tell)
        except TransientFault as fault:
            self._fault = fault
        if acquired and self._is_offloaded:
            with self._timer.part("reload"):
                self.learner.reload()
            self._is_offloaded = False
        return acquired

    def _release_gpu(self) -> None:
        if self._gpu is not None and self._gpu.held:
            free_cached(self.ranks.device)
            if not fits_beside_engine(self._config, self.ranks.device):
                self.learner.offload()
                self._is_offloaded = True
            self._gpu.release()

    def _stops(self) -> bool:
        return self.stopping.is_set() or self.savepoints.writer.failed

    def _by_explorer(self) -> dict[str, float]:
        contributions = self.source.contributions(self.progress.step)
        rows = {f"rows/{name}": float(contribution.rows) for name, contribution in contributions.items()}
        return rows | {
            f"staleness/{name}": part.staleness for name, part in contributions.items() if part.staleness is not None
        }

    def _tell(self, text: str) -> None:
        self.progress.waits = text

    def _save(self) -> None:
        """Copy a checkpoint of the current step, to be written in the background. Collective.

        It gets its final name only when it and everything it depends on are on disk, including the metrics of its
        steps. Until then the store's batches of its steps are not final.
        """
        self.progress.state = "saving"
        step = self.progress.step

        def before_commit() -> None:
            if self._metrics_file is not None:
                self._metrics_file.flush()
            self.source.before_save(step)

        def after_commit() -> None:
            self.progress.saved_step = step
            self.source.commit(step, self.savepoints.oldest())

        last = step == self.progress.total_steps
        self.savepoints.save(self.learner, step, self.publisher, last, before_commit, after_commit)
        self._copied_step = step


def check_first_gap(metrics: Mapping[str, float], step: int, config: Config, on_gpu: bool) -> None:
    """Raise TrinityError if the mean gap of `step` is not plausible (`algorithm.max_rollout_gap`).

    The policy must not have been updated before, so that all versions so far have the same weights.
    """
    gap = metrics.get("rollout_gap/mean")
    if gap is None or metrics.get("staleness/max", math.inf) >= step:  # rows may have no version
        return
    limit = config.algorithm.max_rollout_gap or MAX_FIRST_GAP[_coarser(config, on_gpu)]
    if not gap <= limit:  # or NaN
        raise TrinityError(
            f"algorithm.max_rollout_gap: in step {step} the log-probs of engine and trainer differ by {gap:.3g} nats a "
            f"token in the mean; with the same weights at most {limit:g} is plausible. Look at what changes them in "
            "the engine alone: extra_engine_args, sampling arguments, log-probs that a workflow gives. Set a larger "
            "algorithm.max_rollout_gap if the gap is meant.",
            key="algorithm.max_rollout_gap",
        )


def _coarser(config: Config, on_gpu: bool) -> str:
    engine = config.explorer.rollout_model
    if is_lossy(engine.extra_engine_args):
        return "fp8"
    dtypes = (dtype_of(engine.dtype, on_gpu), dtype_of(config.trainer.dtype, on_gpu))
    return max(dtypes, key=lambda dtype: MAX_FIRST_GAP[dtype])


def make_trainer(config: Config, rank: int, world_size: int, master: tuple[str, int], stopping: Event) -> Trainer:
    """Join the ranks, load models and data, resume from the latest whole checkpoint, publish its weights.
    Collective."""
    load_plugins(config.plugin_dir)
    ranks = join(rank, world_size, *master, use_gpu=uses_gpu())
    torch.manual_seed(config.seed)
    source = open_source(config) if ranks.first else BatchSource()
    total = int(broadcast_bytes(str(total_steps(config, source)).encode() if ranks.first else None, ranks))
    gpu = _shared_gpu(config, stopping)
    learner = Learner(config, total, ranks)
    savepoints = Savepoints(config, ranks, learner.engine.module.lm)
    publisher = None if config.is_supervised else _open_publisher(config, learner, source, stopping)
    step = savepoints.return_to_latest()
    if step:
        savepoints.load(learner, step)
        if ranks.first:
            log.info("training resumes from the checkpoint of step %d", step)
    if ranks.first:
        _note_algorithm(config, step)
    if publisher is not None:
        publisher.rewind(step)
    source.rewind(step)
    if ranks.first:
        metrics_file.rewind(config.job_dir, step, source.explorer_steps)
    if publisher is not None:
        publisher.resume(step, savepoints.layout.step(step))
    progress = Progress(step, total, "ready", step)
    return Trainer(config, learner, ranks, source, publisher, savepoints, progress, stopping, gpu)


def _note_algorithm(config: Config, step: int) -> None:
    """Record the run's algorithm in `trainer_meta.json`; warn about differences from that of its steps up to `step`.

    Differences may also come from the defaults of a newer release.
    """
    path, algorithm = config.layout.trainer_meta, to_dict(config.algorithm)
    noted = read_json(path).get("algorithm", {}) if step else {}
    for key, value in algorithm.items():
        if key in noted and noted[key] != value:
            was, now = json.dumps(noted[key]), json.dumps(value)
            log.warning("algorithm.%s is %s from step %d on; until then it was %s", key, now, step + 1, was)
    update_meta(path, algorithm=algorithm, tokenizer=model_name(config.model.model_path))


def _shared_gpu(config: Config, stopping: Event) -> SharedGpu | None:
    if not config.cluster.colocate:
        return None
    gpu = SharedGpu(config.layout.gpu_lock, "trainer")
    if not gpu.acquire(config.synchronizer.sync_timeout, stopping.is_set):
        raise TransientFault("the trainer was stopped before it had the GPU that it shares")
    return gpu


def _open_publisher(config: Config, learner: Learner, source: BatchSource, stopping: Event) -> Publisher:
    trainer = trainer_rank(policy_weights(config, learner), learner.ranks, source.awaited, stopping.is_set)
    versions = run_versions(config)
    return Publisher(config, learner, versions, versions.publisher(config, trainer), source.explored)
