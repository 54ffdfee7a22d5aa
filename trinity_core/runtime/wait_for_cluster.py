"""Waits for GPUs, nodes and a cluster's head that an earlier attempt had. In the first, their lack is an error."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from trinity_core.errors import TransientFault, TrinityError
from trinity_core.runtime.faults import is_cancelled
from trinity_core.runtime.gpus import FREE_SECONDS

log = logging.getLogger(__name__)

AGAIN_SECONDS = 300.0
"""Dying processes may let go of their GPUs slowly, and a node takes minutes to start."""
LOOK_SECONDS = 5.0
_had_room: set[str | None] = set()
"""Ray addresses (None: a Ray of its own) at which there was room for a run of this process."""
T = TypeVar("T")


def note_room(address: str | None) -> None:
    """There is room for a run of this process in the Ray at `address`."""
    _had_room.add(address)


def gpu_seconds() -> float:
    """Seconds to wait for GPUs of this machine that are in use."""
    return AGAIN_SECONDS if None in _had_room else FREE_SECONDS


def wait_for_cluster(address: str | None, work: Callable[[], T]) -> T:
    """What `work` returns, which needs the Ray at `address`. Raises what it raises.

    A cluster that is joined, and that had room for this process before, is waited for, at most `AGAIN_SECONDS`; then
    raises `TransientFault`.
    """
    deadline = time.monotonic() + AGAIN_SECONDS
    warned = False
    while True:
        try:
            return work()
        except (TrinityError, TransientFault) as fault:
            if address is None or address not in _had_room:
                raise
            if time.monotonic() > deadline or is_cancelled():
                raise TransientFault(str(fault)) from fault
            if not warned:
                log.warning("the cluster is waited for, up to %g s, as it had room before: %s", AGAIN_SECONDS, fault)
            warned = True
        time.sleep(LOOK_SECONDS)
