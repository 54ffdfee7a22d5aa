"""When weights are synchronised: pure arithmetic, no clock and no files.

*Version* n is the weights after trainer step n, 0 the initial ones. Steps count from 1. With interval 2 and offset 1
the explorer runs `1 2 3 |sync| 4 5 |sync| 6` and the trainer `1 2 |sync| 3 4 |sync| 5`.

Two properties, both tested, exclude deadlocks in fixed style: the explorer never waits for a version that needs a batch
of a step it has not explored yet (`required_version(e) <= e - 1`), and every version it waits for is published
(`publishes_after(required_version(e))`). In the other styles an explorer waits only if there is a `StalenessBound`;
`tests/sync/test_sync_interleavings.py` enumerates the possible orders.
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
    """Which side syncs weights at which steps. Raises ValueError for an interval below 1 or an offset below 0."""

    style: SyncStyle
    """`synchronizer.sync_style`; over `nccl` `explorer_driven` becomes `trainer_driven`."""
    interval: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.interval < 1 or self.offset < 0:
            values = f"{self.interval} and {self.offset}"
            raise ValueError(f"sync_interval must be at least 1 and sync_offset at least 0, got {values}")

    @classmethod
    def of(cls, config: Config) -> SyncSchedule:
        sync = config.synchronizer
        return cls(sync.style, sync.sync_interval, sync.sync_offset)

    @property
    def is_lockstep(self) -> bool:
        """True if, in fixed style, each explore step waits for the train step before it."""
        return self.interval == 1 and self.offset == 0

    @property
    def publish_every(self) -> int:
        """Train steps between published versions.

        In `explorer_driven` style every train step publishes, so that the explorer can take the newest weights at any
        time.
        """
        return 1 if self.style == "explorer_driven" else self.interval

    @property
    def largest_lag(self) -> int:
        """Upper bound of the staleness in trainer steps (fixed style, one explore step per batch)."""
        return self.interval - 1 + self.offset

    @property
    def versions_kept(self) -> int:
        """Number of newest versions that must stay loadable so that an explorer finds the one that is due (fixed
        style).

        With `done` explore steps stored, the next one needs a version of at least `done - offset - interval + 1`, and
        the trainer is at most at step `done`, provided an explore step fills no more than one train step. A trainer
        that runs further ahead (`train_batch_size` is smaller) removes versions that are due; explorers then take the
        oldest newer one.
        """
        return self.offset // self.interval + 2

    def publishes_after(self, step: int) -> bool:
        """True if the trainer publishes after its step `step`. After step 0, the start, it always publishes."""
        return step % self.publish_every == 0

    def required_version(self, step: int) -> int:
        """Return the version that explorer step `step` uses in fixed style: 0, then a new one every `interval`
        steps."""
        return max(0, (step - 1 - self.offset) // self.interval * self.interval)

    def dynamic_version(self, step: int, held: int | None, latest: int | None) -> int | None:
        """Return the version for explorer step `step` (from 1) outside fixed style: the latest one, looked for every
        `interval` steps, in `trainer_driven` style before each.

        `held` is the version in the engines (None: none of this run), `latest` the newest published one. Never goes
        back within a lineage; after a rewind (`trinity_core.exchange.store`) an explorer starts over with `held` None.
        """
        if latest is None:
            return held
        if held is None:
            return latest
        looks = self.style == "trainer_driven" or (step - 1) % self.interval == 0
        return max(held, latest) if looks else held

    def resumed_versions(self, step: int, since: int, kept: Collection[int]) -> list[int]:
        """Return the versions that engines need after a resume at train step `step`, ascending; `since` is the oldest
        one.

        These are the older ones that are `kept` somewhere, and the current weights if they are a version or must stand
        in for one.
        """
        older = sorted(version for version in kept if since <= version < step)
        stands_in = since <= step and not older
        return [*older, step] if self.publishes_after(step) or stands_in else older


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Which explore steps may begin, so that no row is trained on more than `max_staleness` versions after its
    sampling.

    Train step t has version t - 1, so its rows must be of version t - 1 - `max_staleness` or newer. Steps take at least
    `batch_rows` rows each, in order of arrival. The last of all pending rows (stored, or of explore steps in progress)
    is thus trained on at step `leased + ceil(rows / batch_rows)` at the latest, where `leased` is the newest train step
    that has its batch. Any step in progress may be the last to arrive. So a further step may begin only if neither
    these steps nor itself would then be too old.
    """

    max_staleness: int
    batch_rows: int
    """Rollouts per train step."""
    publish_every: int = 1
    """Train steps between published versions."""

    def oldest_version(self, rows: int, leased: int) -> int:
        """Return the oldest version allowed for the last of `rows` pending rows."""
        return max(leased + -(-rows // self.batch_rows) - 1 - self.max_staleness, 0)

    def awaited(
        self, version: int, rows: int, leased: int, ready: int, begun: Sequence[tuple[int, int]],
        earlier: Sequence[int] = (),
    ) -> int | None:  # fmt: skip
        """Return None if an explore step of `rows` rows may begin with `version`; else the version that its explorer
        awaits.

        `ready` rows are stored and not leased; `begun` has rows and version of each step that other explorers have
        begun and not stored; `earlier` the rows of each step that has waited longer. None of these may be put off to a
        later version, or explorers with large or slow steps would wait without end. A version newer than `leased` needs
        a further train step, for which the trainer takes the available rows (`trinity_core.exchange.store`): otherwise
        each side would wait for the other.
        """
        pending = ready + sum(others for others, _ in begun)
        if any(self._begins_at(pending + rows + other, leased) > self._begins_at(pending + other, leased)
               for other in earlier):  # fmt: skip
            return leased + 1
        oldest = self.oldest_version(pending + rows, leased)
        if min([version, *(used for _, used in begun)]) >= oldest:
            return None
        published = leased - leased % self.publish_every
        return oldest if oldest <= published else leased + 1

    def _begins_at(self, rows: int, leased: int) -> int:
        """Return the published version with which the last step of `rows` pending rows may begin."""
        return -(-self.oldest_version(rows, leased) // self.publish_every) * self.publish_every


def least_staleness(rows: int, batch_rows: int, publish_every: int) -> int:
    """Return the smallest `max_staleness` with which an explore step of `rows` rows may begin whenever no row waits."""
    return publish_every - 1 + -(-rows // batch_rows) - 1
