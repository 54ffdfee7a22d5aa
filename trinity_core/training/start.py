"""From a configuration to a trainer that is ready to take its next step."""

from __future__ import annotations

import logging
from threading import Event

import torch

from trinity_core.algorithms.objective import Objective
from trinity_core.checkpoints.beginning import model_name
from trinity_core.checkpoints.resume import update_meta
from trinity_core.config import to_dict
from trinity_core.config.schema import Config
from trinity_core.errors import TransientFault
from trinity_core.layout import JobLayout
from trinity_core.plugins import load_plugins
from trinity_core.sync.methods import run_versions
from trinity_core.sync.shared_gpu import SharedGpu
from trinity_core.tracking import metrics_file
from trinity_core.training.distributed import Ranks, broadcast_bytes, join, uses_gpu
from trinity_core.training.learner import Learner
from trinity_core.training.publish import Publisher, policy_weights, trainer_rank
from trinity_core.training.savepoints import Savepoints
from trinity_core.training.sources import BatchSource, open_source, total_steps
from trinity_core.training.trainer import Progress, Trainer

log = logging.getLogger(__name__)


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
    step = savepoints.latest()
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
    """As `_never`."""
    return 0


def open_first(config: Config, ranks: Ranks) -> BatchSource | None:
    """The data, on rank 0 alone."""
    if not ranks.first:
        return None
    pairs = Objective(config.algorithm).policy_loss.rows_per_unit == 2
    return open_source(config, "preferences" if pairs else "demonstrations")
