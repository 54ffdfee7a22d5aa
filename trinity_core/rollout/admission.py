"""Waiting until the rows of an explore step would be fresh enough when they are trained (`max_staleness`)."""

from __future__ import annotations

import time
from collections.abc import Callable

from trinity_core.config import Config
from trinity_core.data.lengths import rollouts_taken
from trinity_core.errors import TransientFault
from trinity_core.rollout.trainer_watch import TrainerWatch
from trinity_core.store.store import ExperienceStore
from trinity_core.sync.schedule import StalenessBound, publish_interval
from trinity_core.sync.versions import WeightVersions
from trinity_core.waits import Pauses, Wait

RETRY_SECONDS = 2.0
"""Between two tries while nothing changes: an explorer that is lost shows in nothing but its silence."""


def staleness_bound(config: Config) -> StalenessBound | None:
    """The bound that an asynchronous explorer keeps; None without `max_staleness`."""
    sync = config.synchronizer
    if sync.max_staleness is None:
        return None
    return StalenessBound(sync.max_staleness, rollouts_taken(config), publish_interval(sync.style, sync.sync_interval))


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
        """Since when, newest train step with a batch, version: while these two stand still, so does the trainer."""

    @property
    def text(self) -> str:
        """What is waited for, in words."""
        return self._wait.text

    def run(self, timeout: float) -> int | None:
        """Blocks; the version with which the step has begun. None if there is no need for it any more.

        Raises `LineageChanged` if the trainer went back, `TransientFault` if it stands still for `timeout` seconds
        (`sync_timeout`).
        """
        pauses = Pauses()
        if self._begins(time.monotonic(), timeout):
            return self._version
        with self._store.watching() as changes:
            while not self._stopping():
                now, state = time.monotonic(), (changes(), self._weights.latest())
                if state != self._seen or now - self._tried >= RETRY_SECONDS:
                    self._seen, self._tried = state, now
                    self._version = max(self._version, state[1] or 0)
                    if self._begins(now, timeout):
                        return self._version
                    if self._watch.has_finished():
                        return None
                pauses.sleep()
        return None

    def _begins(self, now: float, timeout: float) -> bool:
        awaited, leased = self._store.admit(self._explorer, self._rows, self._version, self._bound.awaited)
        if awaited is None:
            return True
        if self._stood is None or self._stood[1:] != (leased, self._version):
            self._stood = (now, leased, self._version)
        trainer = self._store.trainer().describe(time.time())
        self._wait.note(
            f"it needs version {awaited} (max_staleness {self._bound.max_staleness}), has {self._version}; {trainer}"
        )
        if now - self._stood[0] > timeout:
            raise TransientFault(f"explorer {self._explorer} {self.text} (the limit is synchronizer.sync_timeout)")
        return False
