"""Waits for the trainer: for a version, until it finishes, or until it goes back to a checkpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from trinity_core.base.errors import TransientFault
from trinity_core.base.threads import DaemonThreads
from trinity_core.base.waits import Wait, poll
from trinity_core.config import Config
from trinity_core.config.sync_schedule import StalenessBound, SyncSchedule
from trinity_core.data.lengths import rollouts_taken
from trinity_core.exchange.store.presence import TrainerPresence
from trinity_core.exchange.store.store import ExperienceStore
from trinity_core.exchange.sync.shared_gpu import SharedGpu
from trinity_core.exchange.sync.versions import WeightVersions
from trinity_core.rollout.inference.pool import EnginePool
from trinity_core.rollout.records import StepRecords

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Polling interval of the store during a wait for a version."""
RETRY_SECONDS = 2.0
"""Interval of retries while nothing changes: a lost explorer can only be detected by its silence."""


class TrainerWatch:
    """The trainer's state in the store, as seen by the named explorer, which starts now."""

    def __init__(
        self, store: ExperienceStore, explorer: str, total_steps: int | None, length: int | None = None
    ) -> None:  # fmt: skip
        """See `ExperienceStore.join`."""
        self._store = store
        stays_untrained = store.join(explorer, total_steps, length)
        trainer = store.trainer()
        self._outlived = trainer.total if trainer.finished and not stays_untrained else None
        """Total steps of a finished trainer that is expected to be followed by one with more; None otherwise."""
        if self._outlived is not None:
            log.info(
                "the trainer has finished (%d steps), but explorer %s now has more: it continues for a trainer that is "
                "started again", self._outlived, explorer,
            )  # fmt: skip

    def has_finished(self, trainer: TrainerPresence | None = None) -> bool:
        """True if the trainer has finished, so that further rollouts would not be trained on. `trainer` is its state in
        the store, if just read."""
        trainer = trainer or self._store.trainer()
        if not trainer.finished:
            self._outlived = None  # the expected trainer has arrived
        return trainer.finished and trainer.total != self._outlived


class VersionWait:
    """A wait for a version of the weights; it also ends on `stopping`, and when the trainer goes back or finishes."""

    def __init__(
        self, version: int, weights: WeightVersions, store: ExperienceStore, watch: TrainerWatch, lineage: int | None,
        stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._version = version
        self._weights, self._store, self._watch = weights, store, watch
        self._lineage = lineage
        self._stopping = stopping
        self._wait = Wait(f"version {version} of the trainer")
        self._next = 0.0
        self._is_unneeded = False
        self.went_back = False
        """True if the store was rewound during the wait."""

    @property
    def text(self) -> str:
        return self._wait.text

    def run(self, timeout: float) -> int | None:
        """Block until the version, or the oldest newer one, is available and return it; None if it is no longer needed.

        Raises `TransientFault` after `timeout` seconds (`sync_timeout`), with the time the trainer was last seen.
        """
        try:
            version = self._weights.wait(self._version, timeout, self._is_over)
        except TransientFault as fault:
            raise TransientFault(f"{fault}; {self._store.trainer().describe(self._store.now())}") from None
        self._look()
        return None if self._is_unneeded else version

    def _is_over(self) -> bool:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_SECONDS
            self._look()
        return self.went_back or self._is_unneeded or self._stopping()

    def _look(self) -> None:
        trainer = self._store.trainer()
        self.went_back = trainer.lineage != self._lineage
        self._is_unneeded = self._watch.has_finished(trainer)
        self._wait.note(trainer.describe(self._store.now()))


def staleness_bound(config: Config) -> StalenessBound | None:
    """Return the bound of an asynchronous explorer; None without `max_staleness`."""
    most = config.synchronizer.max_staleness
    return None if most is None else StalenessBound(most, rollouts_taken(config), SyncSchedule.of(config).publish_every)


class AdmissionWait:
    """A wait of `explorer` to begin a step of `rows` rows with `version`, or with the newest one if it must wait.

    It also ends on `stopping` and when the trainer has finished.
    """

    def __init__(
        self, explorer: str, rows: int, version: int, bound: StalenessBound, weights: WeightVersions,
        store: ExperienceStore, watch: TrainerWatch, stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._explorer, self._rows, self._version, self._bound = explorer, rows, version, bound
        self._weights, self._store, self._watch, self._stopping = weights, store, watch, stopping
        self._wait = Wait("the trainer: rows of a step begun now would be stale")
        self._tried = 0.0
        self._seen: tuple[int, int | None] | None = None
        self._stood: tuple[float, int, int] | None = None
        """Time since which the newest train step with a batch and the version, the other two, have not changed: the
        trainer stands still."""

    @property
    def text(self) -> str:
        return self._wait.text

    def run(self, timeout: float) -> int | None:
        """Block until the step may begin and return its version; None if it is no longer needed.

        Raises `LineageChanged` if the trainer went back, `TransientFault` if it makes no progress for `timeout` seconds
        (`sync_timeout`).
        """
        if self._begins(time.monotonic(), timeout):
            return self._version
        with self._store.watching() as changes:
            for _ in poll():
                if self._stopping():
                    break
                now, state = time.monotonic(), (changes(), self._weights.latest())
                if state != self._seen or now - self._tried >= RETRY_SECONDS:
                    self._seen, self._tried = state, now
                    self._version = max(self._version, state[1] or 0)
                    if self._begins(now, timeout):
                        return self._version
                    if self._watch.has_finished():
                        return None
        return None

    def _begins(self, now: float, timeout: float) -> bool:
        awaited, leased = self._store.admit(self._explorer, self._rows, self._version, self._bound.awaited)
        if awaited is None:
            return True
        if self._stood is None or self._stood[1:] != (leased, self._version):
            self._stood = (now, leased, self._version)
        trainer = self._store.trainer().describe(self._store.now())
        self._wait.note(
            f"it needs version {awaited} (max_staleness {self._bound.max_staleness}), has {self._version}; {trainer}"
        )
        if now - self._stood[0] > timeout:
            raise TransientFault(f"explorer {self._explorer} {self.text} (the limit is synchronizer.sync_timeout)")
        return False


class GpuTurn:
    """The explorer's turn on a shared GPU; outside it the engines sleep. Without a shared GPU it is always its turn."""

    def __init__(self, config: Config, records: StepRecords) -> None:
        lock, side = config.layout.gpu_lock, f"explorer {config.explorer.name}"
        self._gpu = SharedGpu(lock, side) if config.cluster.colocate else None
        self._timeout = config.synchronizer.sync_timeout
        self._records = records

    @property
    def is_shared(self) -> bool:
        return self._gpu is not None

    @property
    def is_over(self) -> bool:
        """True if the engines sleep."""
        return self._gpu is not None and not self._gpu.held

    @property
    def text(self) -> str:
        return self._gpu.text if self._gpu else ""

    async def begin(self, pool: EnginePool, is_unneeded: Callable[[], bool]) -> bool:
        """Wait for the trainer to release the GPU, and wake the engines; False once `is_unneeded()`.

        Raises what `SharedGpu.acquire` and `EnginePool.wake` raise.
        """
        if self._gpu is None or self._gpu.held:
            return True
        run = asyncio.get_running_loop().run_in_executor
        with self._records.spent("wait"):
            acquired = await run(DaemonThreads("gpu"), self._gpu.acquire, self._timeout, is_unneeded)
        if acquired:
            with self._records.spent("wake"):
                await pool.wake()
        return acquired

    def tell_progress(self) -> None:
        """Called when a step is stored: the trainer's time limit starts over."""
        if self._gpu is not None:
            self._gpu.tell_progress()

    async def end(self, pool: EnginePool) -> None:
        """Put the engines to sleep and release the GPU to the trainer."""
        if self._gpu is not None and self._gpu.held:
            with self._records.spent("sleep"):
                await pool.sleep()
            self._gpu.release()
