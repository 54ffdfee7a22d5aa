"""`TrainerWorker`: one rank of the trainer, from start to end. `TrainerActor` is its Ray actor.

Order of calls: `rendezvous` on rank 0, `start` on all ranks at once, `run` on all ranks at once. `stop` and `progress`
may be called from another thread at any time.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any

import torch

from trinity_core.addresses import LOOPBACK
from trinity_core.algorithms.objective import Objective
from trinity_core.checkpoints.beginning import model_name
from trinity_core.checkpoints.resume import update_meta
from trinity_core.config import to_dict
from trinity_core.config.schema import Config
from trinity_core.errors import TransientFault, on_failure
from trinity_core.imports import lean_imports
from trinity_core.layout import JobLayout
from trinity_core.plugins import load_plugins
from trinity_core.runlock import LINGER_SECONDS, TRAINER, hold, release
from trinity_core.sync.shared_gpu import SharedGpu
from trinity_core.sync.versions import run_versions
from trinity_core.tracking import metrics_file
from trinity_core.tracking.logs import Logged, start_log
from trinity_core.training.distributed import Ranks, broadcast_bytes, join, meeting_point, uses_gpu
from trinity_core.training.learner import Learner
from trinity_core.training.publish import Publisher, policy_weights, trainer_rank
from trinity_core.training.savepoints import Savepoints
from trinity_core.training.sources import BatchSource, open_source, total_steps
from trinity_core.training.trainer import Progress, Trainer

if TYPE_CHECKING:
    from trinity_core.training.trainer import Trainer


log = logging.getLogger(__name__)


class TrainerWorker:
    """Rank `rank` of `world_size`; each has its own process, and its own GPU if there are any."""

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1) -> None:
        start_log()
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._stopping = Event()
        self._trainer: Trainer | None = None

    def renew(self, config: Config) -> None:
        """Become the same rank of another trainer, which `start` loads; what this one held is let go.

        The process, its imports and its group of ranks are kept.
        """
        release(self.config.job_dir, TRAINER)
        self.config = config
        self._stopping = Event()
        self._trainer = None
        gc.collect()  # DeepSpeed's engines refer to themselves

    def rendezvous(self) -> tuple[str, int]:
        """An address and a port where the ranks can meet; to be called on rank 0."""
        return meeting_point()

    def start(self, master_addr: str = LOOPBACK, master_port: int = 0) -> dict[str, Any]:
        """Join the other ranks, load the models, go to the latest checkpoint and publish its weights.

        Returns `progress()`. Collective. Raises TrinityError for a model, data set or checkpoint that cannot be used.
        """
        if self.rank == 0:
            hold(self.config.job_dir, TRAINER, LINGER_SECONDS)
        with lean_imports(), Logged(f"the start of trainer rank {self.rank} of {self.world_size}", log):
            from trinity_core.training.worker import make_trainer

            master = (master_addr, master_port) if master_port else self.rendezvous()
            self._trainer = make_trainer(self.config, self.rank, self.world_size, master, self._stopping)
        return self.progress()

    def run(self, loop: Callable[[Trainer], None]) -> dict[str, Any]:
        """Train by `loop` (`trinity_core.runtime.run.train`) to the end, or until `stop`; the trainer's summary."""
        assert self._trainer is not None, "start comes before run"
        with Logged(f"training on rank {self.rank}", log):
            with self._trainer.present(), on_failure(self._trainer.savepoints.writer.let_go):
                loop(self._trainer)
            return self._trainer.summary()

    def convert(self, step: int, merge: bool = True) -> str:
        """The checkpoint of `step` as a Hugging Face folder, made in this process, which has torch loaded already."""
        from trinity_core.checkpoints.huggingface import huggingface_folder

        return str(huggingface_folder(self.config, step, merge))

    def remove_shared_weights(self) -> None:
        """Remove the weights published through this machine's shared memory, which are of no use after the run."""
        from trinity_core.sync.versions import run_versions

        run_versions(self.config).remove()

    def stop(self) -> None:
        """Ask `run` to save at the next step boundary and return."""
        self._stopping.set()

    def progress(self) -> dict[str, Any]:
        """step, total_steps, state, what it waits for in words, saved_step and the metrics of the last step."""
        from dataclasses import asdict

        if self._trainer is None:
            return {"step": 0, "total_steps": self.config.buffer.total_steps, "state": "starting", "waits": ""}
        return asdict(self._trainer.progress)


class TrainerActor(TrainerWorker):
    """SIGTERM, as a machine that is taken away sends it to every process, lets it save at the next step boundary."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: self.stop())


def make_trainer(config: Config, rank: int, world_size: int, master: tuple[str, int], stopping: Event) -> Trainer:
    """Join the ranks, load what is needed, resume from the latest whole checkpoint, publish its weights. Collective."""
    load_plugins(config.plugin_dir)
    ranks = join(rank, world_size, *master, use_gpu=uses_gpu())
    torch.manual_seed(config.seed)
    source = open_first(config, ranks)
    total = int(broadcast_bytes(str(total_steps(config, source)).encode() if source else None, ranks))
    gpu = _shared_gpu(config, stopping)
    learner = Learner(config, total, ranks)
    if ranks.first:
        algorithm, model_path = to_dict(config.algorithm), model_name(config.model.model_path)
        update_meta(JobLayout(config.job_dir).trainer_meta, algorithm=algorithm, tokenizer=model_path)
    savepoints = Savepoints(config, ranks, learner.engine.module.lm)
    publisher = None if config.is_supervised else _open_publisher(config, learner, source, stopping)
    step = savepoints.return_to_latest()
    if step:
        savepoints.load(learner, step)
        if ranks.first:
            log.info("training resumes from the checkpoint of step %d", step)
    if publisher is not None:
        publisher.rewind(step)
    if source is not None:
        source.rewind(step)
        metrics_file.rewind(config.job_dir, step, source.explorer_steps)
    if publisher is not None:
        publisher.resume(step, savepoints.layout.step(step))
    progress = Progress(step, total, "ready", step)
    return Trainer(config, learner, ranks, source, publisher, savepoints, progress, stopping, gpu)


def _shared_gpu(config: Config, stopping: Event) -> SharedGpu | None:
    """The GPU that an engine shares, once that has left it; None if there is none."""
    if not config.cluster.colocate:
        return None
    gpu = SharedGpu(JobLayout(config.job_dir).gpu_lock, "trainer")
    if not gpu.acquire(config.synchronizer.sync_timeout, stopping.is_set):
        raise TransientFault("the trainer was stopped before it had the GPU that it shares")
    return gpu


def _open_publisher(config: Config, learner: Learner, source: BatchSource | None, stopping: Event) -> Publisher:
    explorers_wait = source.awaited if source is not None else _never
    weights = policy_weights(config, learner)
    trainer = trainer_rank(weights, learner.ranks, explorers_wait, stopping.is_set)
    versions = run_versions(config)
    explored = source.explored if source is not None else _nothing
    return Publisher(config, learner, versions, versions.publisher(config, trainer), explored)


def _never(version: int) -> bool:
    """On ranks other than the first, which alone asks."""
    return False


def _nothing() -> int:
    return 0


def open_first(config: Config, ranks: Ranks) -> BatchSource | None:
    """The data, on rank 0 alone."""
    if not ranks.first:
        return None
    pairs = Objective(config.algorithm).policy_loss.rows_per_unit == 2
    return open_source(config, "preferences" if pairs else "demonstrations")
