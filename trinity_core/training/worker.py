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

from trinity_core.base.addresses import LOOPBACK
from trinity_core.base.errors import on_failure
from trinity_core.base.lazy import lean_imports
from trinity_core.base.runlock import LINGER_SECONDS, TRAINER_PROCESS, hold, release
from trinity_core.config.paths import trainer_name
from trinity_core.config.schema import Config
from trinity_core.exchange.tracking.logs import log_environment, logged, move_log, start_log
from trinity_core.training.distributed import meeting_point

if TYPE_CHECKING:
    from trinity_core.training.trainer import Trainer


log = logging.getLogger(__name__)


class TrainerWorker:
    """One rank of the trainer, in its own process, with its own GPU if there are any.

    `threads`: CPU threads of torch in this process; None for torch's default.
    """

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1, threads: int | None = None) -> None:
        start_log()
        self.threads = threads
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._stopping = Event()
        self._trainer: Trainer | None = None

    def renew(self, config: Config, threads: int | None = None) -> None:
        """Become the same rank of another trainer, which `start` loads; release the old one.

        The process, its imports and its process group are kept.
        """
        release(self.config.job_dir, TRAINER_PROCESS)
        self.config, self.threads = config, threads
        move_log(log_environment(config, trainer_name(config, self.rank)))
        self._stopping = Event()
        self._trainer = None
        gc.collect()  # DeepSpeed's engines refer to themselves

    def rendezvous(self) -> tuple[str, int]:
        """Return the address and port where the ranks meet. Called on rank 0."""
        return meeting_point()

    def start(self, master_addr: str = LOOPBACK, master_port: int = 0) -> dict[str, Any]:
        """Join the other ranks, load the models, resume from the latest checkpoint and publish its weights. Collective.

        Returns `progress()`. Raises TrinityError for a model, data set or checkpoint that cannot be used.
        """
        if self.rank == 0:
            hold(self.config.job_dir, TRAINER_PROCESS, LINGER_SECONDS)
        with lean_imports(), logged(f"the start of trainer rank {self.rank} of {self.world_size}", log):
            from trinity_core.training.trainer import make_trainer

            self._set_threads()
            master = (master_addr, master_port) if master_port else self.rendezvous()
            self._trainer = make_trainer(self.config, self.rank, self.world_size, master, self._stopping)
        return self.progress()

    def run(self, loop: Callable[[Trainer], None]) -> dict[str, Any]:
        """Train with `loop` (`trinity_core.run.loop.train`) until the end or `stop`; return the trainer's
        summary."""
        assert self._trainer is not None, "start comes before run"
        self._set_threads()
        with logged(f"training on rank {self.rank}", log):
            with self._trainer.present(), on_failure(self._trainer.savepoints.writer.let_go):
                loop(self._trainer)
            return self._trainer.summary()

    def _set_threads(self) -> None:
        """Set torch's thread count in this thread: torch keeps one for each thread that computes."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)

    def convert(self, step: int, merge: bool = True) -> str:
        """Return the Hugging Face folder made of checkpoint `step`. Runs in this process because torch is loaded
        already."""
        from trinity_core.exchange.checkpoints.huggingface import huggingface_folder

        return str(huggingface_folder(self.config, step, merge))

    def remove_shared_weights(self) -> None:
        """Remove the weights published through this machine's shared memory; nobody reads them after the run."""
        from trinity_core.exchange.sync.versions import run_versions

        run_versions(self.config).remove()

    def stop(self) -> None:
        """Ask `run` to save at the next step boundary and return."""
        self._stopping.set()

    def progress(self) -> dict[str, Any]:
        """Return step, total_steps, state, waits (what for, as text), saved_step and the last step's metrics."""
        from dataclasses import asdict

        if self._trainer is None:
            return {"step": 0, "total_steps": self.config.buffer.total_steps, "state": "starting", "waits": ""}
        return asdict(self._trainer.progress)


class TrainerActor(TrainerWorker):
    """Saves at the next step boundary after SIGTERM, which preempted machines send to every process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: self.stop())
