"""When weights are synchronised: pure arithmetic, no clock and no files.

Words: *version* n is the weights after trainer step n, 0 the initial ones. Steps count from 1. `style`, `interval` and
`offset` are `synchronizer.style`, `sync_interval` and `sync_offset`. With interval 2 and offset 1 the explorer goes
`1 2 3 |sync| 4 5 |sync| 6` and the trainer `1 2 |sync| 3 4 |sync| 5`.

Two properties, both tested, exclude deadlocks in fixed style: the explorer never waits for a version that needs a batch
of a step it has not done yet (`required_version(e) <= e - 1`), and every version it waits for is
published (`publishes_after(required_version(e))`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_core.config.schema.synchronizer import SyncStyle


def _check(interval: int, offset: int) -> None:
    if interval < 1 or offset < 0:
        raise ValueError(f"sync_interval must be at least 1 and sync_offset at least 0, got {interval} and {offset}")


def required_version(step: int, interval: int, offset: int = 0) -> int:
    """The version that explorer step `step` (from 1) uses in fixed style: 0, then a new one each `interval` steps."""
    _check(interval, offset)
    return max(0, (step - 1 - offset) // interval * interval)


def last_step_with(version: int, interval: int, offset: int = 0) -> int:
    """The last explorer step that may run when no version newer than `version` is published (fixed style)."""
    _check(interval, offset)
    return version // interval * interval + interval + offset


def syncs_before(step: int, interval: int, offset: int = 0) -> bool:
    """True if the explorer loads new weights before its step `step` in fixed style."""
    return step > 1 and required_version(step, interval, offset) != required_version(step - 1, interval, offset)


def publish_interval(style: SyncStyle, interval: int) -> int:
    """Train steps from one published version to the next.

    An explorer that decides when it takes weights (`explorer_driven`) finds those of the last train step at any time.
    """
    return 1 if style == "explorer_driven" else interval


def look_interval(style: SyncStyle, interval: int) -> int:
    """Explore steps from one look for newer weights to the next, for an explorer that does not wait for a version.

    Where the trainer decides (`trainer_driven`), the explorer takes up a version before its next step.
    """
    return 1 if style == "trainer_driven" else interval


def publishes_after(step: int, interval: int) -> bool:
    """True if the trainer publishes after its step `step`. Step 0 is the start, after which it always publishes."""
    _check(interval, 0)
    return step % interval == 0


def looks_before(step: int, interval: int) -> bool:
    """True if an explorer that looks every `interval` steps looks before its step `step` (from 1)."""
    _check(interval, 0)
    return (step - 1) % interval == 0


def dynamic_version(step: int, interval: int, held: int | None, latest: int | None) -> int | None:
    """The version for explorer step `step` outside fixed style: the latest one, looked for every `interval` steps.

    `held` is the version in the engines (None: none of this run), `latest` the newest published one. Never goes back
    within a lineage; after a rewind (see `trinity_core.store`) an explorer starts over with `held` None.
    """
    if latest is None:
        return held
    if held is None:
        return latest
    return max(held, latest) if looks_before(step, interval) else held


def largest_lag(interval: int, offset: int = 0) -> int:
    """Upper bound of the staleness in trainer steps (fixed style, one explore step a batch)."""
    _check(interval, offset)
    return interval - 1 + offset
