"""The trainer's workers as a unit: when one is lost, all of them restart from the latest checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trinity_core.base.errors import TransientFault, TrinityError
from trinity_core.config.paths import trainer_name
from trinity_core.config.sync_methods import SYNC_METHODS
from trinity_core.exchange.tracking.progress import ActorWaits, ProgressReport
from trinity_core.hosting.actors import SAVE_SECONDS, Actors, connect_trainers, run_until_done
from trinity_core.hosting.faults import AGAIN, POLL_SECONDS, ProcessLost, Stopped, answering, get, result_of, starting

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Restarts of the workers before the attempt fails. Workers that keep dying (too little memory) will die again."""
ANSWER_SECONDS = 10.0
"""Time for a worker to answer after another one has failed."""
REMOVE_SECONDS = 3.0
"""Time for rank 0 to remove the weights it has published. Prefect kills a cancelled run 30 s after asking it to end."""


class Trainers:
    """The workers of one trainer. `check` raises if waiting is pointless; `stopping` is true once the run must end.

    The explorer is not restarted: going back rewinds the store, which makes the explorer start over.
    """

    def __init__(
        self,
        actors: Actors,
        check: Callable[[], None],
        stopping: Callable[[], bool],
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`make_room` is called before the workers start, and waits for what must not start at the same time."""
        self.workers: list[Any] = []
        self._connected = 0
        """Number of times that the workers became ready for a step."""
        self._actors, self._cluster, self._config = actors, actors.cluster, actors.config
        self._check, self._stopping, self._make_room = check, stopping, make_room
        self._ended = threading.Event()

    def train(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        """Run the workers with `loop` until the last step or until the run is stopping; return rank 0's summary.

        Raises a worker's error, and ProcessLost if workers were lost more than `MAX_RESTARTS` times.
        """
        try:
            return self._train(loop, report)
        finally:
            self._ended.set()

    def _train(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        for restart in range(1, MAX_RESTARTS + 2):
            try:
                return self._attempt(loop, report)
            except Exception as error:
                loss = self._loss(error)
                if loss is None:
                    raise
                if restart > MAX_RESTARTS or not self._can_return():
                    raise loss from error
                log.warning(
                    "the trainer returns to its latest checkpoint (%d of %d): %s", restart, MAX_RESTARTS, loss.reason
                )
                self._cluster.kill(self.workers)
                self.workers = []
        raise AssertionError("the last restart returns or raises")

    @property
    def rewinds(self) -> int:
        """Number of times the trainer has gone back to a checkpoint and is ready again."""
        return max(0, self._connected - 1)

    def wait_for_rewind(self, seen: int) -> bool:
        """Wait until the trainer has ended or the run is stopping; return True if it has gone back more than `seen`
        times.

        A finished explorer then has steps to explore again.
        """
        while self.rewinds == seen:
            if self._ended.is_set() or self._stopping():
                return False
            self._check()
            time.sleep(POLL_SECONDS)
        return True

    def convert(self, step: int, merge: bool = True) -> Path:
        """Return the checkpoint of `step` in Hugging Face format, see `checkpoints.convert`."""
        worker = self.workers[0]
        check = answering({trainer_name(self._config, 0): worker}, self._check)
        return Path(result_of(worker.convert.remote(step, merge), check))

    def remove_shared_weights(self) -> None:
        """Let rank 0 remove the weights in its machine's shared memory; it may be on another node than the flow."""
        if not self.workers or not self._cluster.address or not self._cluster.alive():
            return
        try:
            get(self.workers[0].remove_shared_weights.remote(), REMOVE_SECONDS)
        except TransientFault as fault:
            log.warning("weights may be left in shared memory on the node of trainer rank 0: %s", fault)

    def _attempt(self, loop: Callable[..., Any], report: ProgressReport) -> dict[str, Any]:
        self._make_room()
        self.workers = self._actors.start_trainers()
        names = {trainer_name(self._config, rank): worker for rank, worker in enumerate(self.workers)}
        check = answering(names, self._check)
        loading = starting("the trainer's workers", self._cluster.unplaced, check)
        progress = connect_trainers(self.workers, loading, self._stopping)
        self._connected += 1
        report.total_steps = progress["total_steps"]
        report.actor = ActorWaits(lambda: self.workers[0].progress.remote().future())

        def stop() -> None:
            for worker in self.workers:
                worker.stop.remote()

        runs = [worker.run.remote(loop) for worker in self.workers]
        summaries = run_until_done(runs, stop, self._stopping, SAVE_SECONDS, check, report)
        if summaries[0].get("stopped") and not self._stopping():
            raise Stopped(f"The trainer got SIGTERM and has saved step {summaries[0]['step']}. {AGAIN}")
        return summaries[0]

    def _loss(self, error: Exception) -> ProcessLost | None:
        """Return the loss of a worker if it caused `error`, such as a broken connection to the lost worker."""
        if isinstance(error, ProcessLost):
            return error
        if isinstance(error, TrinityError | TransientFault):
            return None
        import ray

        answers = [worker.progress.remote() for worker in self.workers]
        for answer in ray.wait(answers, num_returns=len(answers), timeout=ANSWER_SECONDS)[0]:
            try:
                get(answer)
            except ProcessLost as loss:
                return loss
        return None

    def _can_return(self) -> bool:
        """Return False if engines would wait for a connection of the lost worker, or if Ray itself has died."""
        method = SYNC_METHODS[self._config.synchronizer.sync_method]
        connected = bool(self._actors.placement.engines) and bool(method.vllm_backend)
        return not connected and not self._stopping() and self._cluster.alive()
