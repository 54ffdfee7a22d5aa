"""When weights are synchronised: pure arithmetic, no clock and no files.

Words: *version* n is the weights after trainer step n, 0 the initial ones. Steps count from 1. With interval 2 and
offset 1 the explorer goes `1 2 3 |sync| 4 5 |sync| 6` and the trainer `1 2 |sync| 3 4 |sync| 5`.

Two properties, both tested, exclude deadlocks in fixed style: the explorer never waits for a version that needs a batch
of a step it has not explored yet (`required_version(e) <= e - 1`), and every version it waits for is published
(`publishes_after(required_version(e))`). In the other styles an explorer waits only where a `StalenessBound` is given;
`tests/sync/test_sync_interleavings.py` enumerates what may happen then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity_core.config.schema import Config
    from trinity_core.config.schema.synchronizer import SyncStyle


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Who syncs weights at which steps. Raises ValueError for an interval below 1 or an offset below 0."""

    style: SyncStyle
    """`synchronizer.sync_style`; over `nccl` `explorer_driven` becomes `trainer_driven`."""
    interval: int
    """`synchronizer.sync_interval`."""
    offset: int = 0
    """`synchronizer.sync_offset`."""

    def __post_init__(self) -> None:
        if self.interval < 1 or self.offset < 0:
            values = f"{self.interval} and {self.offset}"
            raise ValueError(f"sync_interval must be at least 1 and sync_offset at least 0, got {values}")

    @classmethod
    def of(cls, config: Config) -> SyncSchedule:
        """The schedule of a run."""
        sync = config.synchronizer
        return cls(sync.style, sync.sync_interval, sync.sync_offset)

    @property
    def is_lockstep(self) -> bool:
        """True if, in fixed style, each explore step waits for the train step before it."""
        return self.interval == 1 and self.offset == 0

    @property
    def publish_every(self) -> int:
        """Train steps from one published version to the next.

        An explorer that decides when it takes weights (`explorer_driven`) finds those of the last train step any time.
        """
        return 1 if self.style == "explorer_driven" else self.interval

    @property
    def look_every(self) -> int:
        """Explore steps from one look for newer weights to the next, for an explorer that does not wait for a version.

        Where the trainer decides (`trainer_driven`), the explorer takes up a version before its next step.
        """
        return 1 if self.style == "trainer_driven" else self.interval

    @property
    def largest_lag(self) -> int:
        """Upper bound of the staleness in trainer steps (fixed style, one explore step a batch)."""
        return self.interval - 1 + self.offset

    @property
    def versions_kept(self) -> int:
        """Newest versions that must stay loadable so that an explorer finds the one that is due (fixed style).

        With `done` explore steps stored, the next one needs a version of `done - offset - interval + 1` or newer, and
        the trainer is at step `done` at most, if an explore step fills no more than one train step. A trainer that runs
        further ahead (`train_batch_size` is smaller) removes versions that are due; explorers then take the oldest
        newer one.
        """
        return self.offset // self.interval + 2

    def publishes_after(self, step: int) -> bool:
        """True if the trainer publishes after its step `step`. Step 0 is the start, after which it always publishes."""
        return step % self.publish_every == 0

    def looks_before(self, step: int) -> bool:
        """True if an explorer that does not wait for a version looks for one before its step `step` (from 1)."""
        return (step - 1) % self.look_every == 0

    def required_version(self, step: int) -> int:
        """The version that explorer step `step` uses in fixed style: 0, then a new one each `interval` steps."""
        return max(0, (step - 1 - self.offset) // self.interval * self.interval)

    def dynamic_version(self, step: int, held: int | None, latest: int | None) -> int | None:
        """The version for explorer step `step` outside fixed style: the latest one, looked for every few steps.

        `held` is the version in the engines (None: none of this run), `latest` the newest published one. Never goes
        back within a lineage; after a rewind (see `trinity_core.store`) an explorer starts over with `held` None.
        """
        if latest is None:
            return held
        if held is None:
            return latest
        return max(held, latest) if self.looks_before(step) else held

    def resumed_versions(self, step: int, since: int, kept: Collection[int]) -> list[int]:
        """The versions that engines need after a resume at train step `step`, ascending; `since` is the oldest one.

        Of the older ones those `kept` somewhere; the present weights if they are a version, or must stand in for one.
        """
        older = sorted(version for version in kept if since <= version < step)
        stands_in = since <= step and not older
        return [*older, step] if self.publishes_after(step) or stands_in else older


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Which explore steps may begin, so that no row is trained more than `max_staleness` versions after it was sampled.

    Train step t has version t - 1, so its rows must be of version t - 1 - `max_staleness` or newer. Steps take at least
    `batch_rows` rows each in order of arrival. Of all rows on their way (stored, or of explore steps that have begun)
    the last one is thus trained at step `leased + ceil(rows / batch_rows)` at the latest, where `leased` is the newest
    train step that has its batch. Any step that has begun may be the last to arrive. So a further one begins only if
    none of them, nor itself, would then be too old.
    """

    max_staleness: int
    batch_rows: int
    """Rollouts that a train step takes."""
    publish_every: int = 1
    """Train steps from one published version to the next."""

    def oldest_version(self, rows: int, leased: int) -> int:
        """The oldest version that the last of `rows` rows on their way may be of."""
        return max(leased + -(-rows // self.batch_rows) - 1 - self.max_staleness, 0)

    def awaited(self, version: int, rows: int, leased: int, ready: int, begun: Sequence[tuple[int, int]]) -> int | None:
        """None if an explore step of `rows` rows may begin with `version`; else the version that its explorer awaits.

        `ready` rows are stored and not leased; `begun` has rows and version of each step that other explorers have
        begun and not stored. A version newer than `leased` needs a further train step, for which the trainer takes the
        rows that are there (`trinity_core.store`): otherwise each side would wait for the other.
        """
        oldest = self.oldest_version(ready + rows + sum(others for others, _ in begun), leased)
        if min([version, *(used for _, used in begun)]) >= oldest:
            return None
        published = leased - leased % self.publish_every
        return oldest if oldest <= published else leased + 1


def least_staleness(rows: int, batch_rows: int, publish_every: int) -> int:
    """The smallest `max_staleness` with which an explore step of `rows` rows may begin whenever no row waits."""
    return publish_every - 1 + -(-rows // batch_rows) - 1
