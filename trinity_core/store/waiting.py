"""How long a trainer waits for the batch of a step, and what it says if none comes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from trinity_core.data.experience import Experience
from trinity_core.errors import TransientFault, TrinityError
from trinity_core.store.expert import ExpertSource
from trinity_core.store.presence import all_is_dropped, describe_explorers
from trinity_core.store.stats import Stats
from trinity_core.store.store import ExperienceStore
from trinity_core.store.strategies import Strategy
from trinity_core.waits import poll

log = logging.getLogger(__name__)

SHORT = "train step %d takes %d rows instead of %s: no more came in %g s (max_read_timeout); %s"


def wait_lease(
    store: ExperienceStore, step: int, rows: int, newest_version: int, strategy: Strategy | None = None,
    expert: ExpertSource | None = None, timeout: float = 1800.0, stop: Callable[[], bool] | None = None,
    explore_steps: int | None = None,
) -> list[Experience] | None:  # fmt: skip
    """`ExperienceStore.lease`, waiting until there is a batch; None once `stop()` is true.

    After `timeout` seconds (`max_read_timeout`) an incomplete batch is taken, with a warning. Without a single row,
    raises `TransientFault`, or `TrinityError` where explorers have worked meanwhile and nothing is left of what they
    made.
    """
    lease = partial(store.lease, step, rows, newest_version, strategy, expert, explore_steps=explore_steps)
    before, seen = store.explorer_steps(), -1
    with store.watching() as changes:
        for _ in poll(timeout):
            now = changes()
            if now != seen:
                seen = now
                if (batch := lease()) is not None:
                    return batch
            if stop is not None and stop():
                return None
    stats = store.stats()
    if not stats.ready:
        raise _nothing_came(step, timeout, before, stats)
    if batch := lease(final=True):
        known = describe_explorers(stats.explorers, stats.now)
        wanted = f"{explore_steps} whole explore steps" if explore_steps else rows
        log.warning(SHORT, step, len(batch), wanted, timeout, known)
    return batch


def _nothing_came(step: int, timeout: float, before: Mapping[str, int], stats: Stats) -> TrinityError | TransientFault:
    nothing = f"no experience came for train step {step} in {timeout:g} s (max_read_timeout); "
    known = describe_explorers(stats.explorers, stats.now)
    if all_is_dropped(stats.explorers, before, stats.now):
        return TrinityError(
            f"{nothing}{known}. Explorers work, but nothing is left of what they make: see their metrics "
            "experiences and experiences/kept, and data_processor.experience_pipeline.operators"
        )
    return TransientFault(nothing + known)
