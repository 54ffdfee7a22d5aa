"""What a run says while its processes start: in the log whom it waits for, in the store that its explorer will come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from trinity_core.config import Config, store_url
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.runtime.ending import ANOTHER_FOLLOWS
from trinity_core.runtime.faults import is_transient
from trinity_core.store.presence import EXPLORER, SEEN_SECONDS
from trinity_core.store.store import ExperienceStore
from trinity_core.waits import Wait

log = logging.getLogger(__name__)


class StartWait:
    """A wait for processes of a run that begins now; `unplaced` names those that Ray has yet to start."""

    def __init__(self, what: str, unplaced: Callable[[], Sequence[str]], check: Callable[[], None]) -> None:
        self._wait = Wait(f"{what} to start")
        self._unplaced, self._check = unplaced, check

    def check(self) -> None:
        """To be called while waiting. Raises what the run's `check` raises."""
        self._check()
        late = ", ".join(self._unplaced())
        self._wait.note(f"Ray has yet to start {late}" if late else "they are loading")


class Arrival:
    """The explorer of a run that is starting: others know of it before it works, and speaks for itself."""

    def __init__(self, config: Config, check: Callable[[], None]) -> None:
        self._config, self._check = config, check
        self._due = 0.0

    def check(self) -> None:
        """To be called while waiting: notes in the store every few seconds that the explorer is there."""
        self._check()
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + SEEN_SECONDS
        try:
            with _store(self._config) as store:
                store.seen(EXPLORER, self._config.explorer.name)
        except (TransientFault, TrinityError) as fault:
            log.warning("explorer %s cannot note that it is starting: %s", self._config.explorer.name, fault)


def withdraw(config: Config, error: BaseException) -> None:
    """After a failure or a cancellation: nobody waits for this explorer, unless another attempt follows."""
    if isinstance(error, Exception) and is_transient(error) and ANOTHER_FOLLOWS.get()():
        return
    with _store(config) as store:
        store.leave(config.explorer.name)
    log.info("explorer %s has left the run", config.explorer.name)


def _store(config: Config) -> ExperienceStore:
    return ExperienceStore.open(store_url(config), str(config.job_dir))
