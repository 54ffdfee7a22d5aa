"""How long a trainer waits for the batch of a step, and what it says if none comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from trinity_core.data.experience import Experience
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.store.expert import ExpertSource
from trinity_core.store.presence import all_is_dropped, describe_explorers
from trinity_core.store.stats import Stats
from trinity_core.store.store import ExperienceStore
from trinity_core.store.strategies import Strategy
from trinity_core.waits import Pauses


def wait_lease(
    store: ExperienceStore, step: int, rows: int, newest_version: int, strategy: Strategy | None = None,
    expert: ExpertSource | None = None, timeout: float = 1800.0, stop: Callable[[], bool] | None = None,
) -> list[Experience] | None:  # fmt: skip
    """`ExperienceStore.lease`, waiting until there is a batch; None once `stop()` is true.

    After `timeout` seconds (`max_read_timeout`) an incomplete batch is taken. Without a single row, raises
    `TransientFault`, or `TrinityError` where explorers have worked meanwhile and nothing is left of what they made.
    """
    lease = partial(store.lease, step, rows, newest_version, strategy, expert)
    deadline, before = time.monotonic() + timeout, store.explorer_steps()
    pauses, seen = Pauses(), -1
    with store.watching() as look:
        while True:
            now = look()
            if now != seen:
                seen = now
                if (batch := lease()) is not None:
                    return batch
            if stop is not None and stop():
                return None
            if time.monotonic() > deadline:
                stats = store.stats()
                if not stats.ready:
                    raise _nothing_came(step, timeout, before, stats)
                return lease(final=True)
            pauses.sleep()


def _nothing_came(step: int, timeout: float, before: Mapping[str, int], stats: Stats) -> TrinityError | TransientFault:
    nothing, now = f"no experience came for train step {step} in {timeout:g} s (max_read_timeout); ", time.time()
    known = describe_explorers(stats.explorers, now)
    if all_is_dropped(stats.explorers, before, now):
        return TrinityError(
            f"{nothing}{known}. Explorers work, but nothing is left of what they make: see their metrics "
            "experiences and experiences/kept, and data_processor.experience_pipeline.operators"
        )
    return TransientFault(nothing + known)
