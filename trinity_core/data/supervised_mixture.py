"""Several data sets in one batch, by their shares: a pure function of (sets, shares, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trinity_core.data.experience import Experience
from trinity_core.data.supervised import SupervisedSet, rows_of_batch


def apportioned(count: int, shares: Sequence[float]) -> list[int]:
    """How many of the first `count` rows each set gives: whole numbers that add up to `count` and, as it grows, never
    shrink."""
    found, left, weight = [], count, sum(shares)
    for share in shares[:-1]:
        own = min(int(left * share / weight + 0.5), left)
        found.append(own)
        left, weight = left - own, weight - share
    return [*found, left]


@dataclass(frozen=True)
class SupervisedMixture:
    """Data sets that give rows of every batch in proportion to their shares, each in its own order.

    The first is the one whose epochs count; the others are repeated, or used in part.
    """

    sets: Sequence[SupervisedSet]
    shares: Sequence[float]

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @property
    def experiences_per_row(self) -> int:
        """2 for preferences, else 1."""
        return self.sets[0].experiences_per_row

    def take(self, start: int, count: int, prefix: str = "") -> list[Experience]:
        """The experiences of `count` rows after `start` rows; with `prefix` groups are numbered within it."""
        before, after = apportioned(start, self.shares), apportioned(start + count, self.shares)
        taken: list[Experience] = []
        for data, first, last in zip(self.sets, before, after, strict=True):
            for slot, row in enumerate(data.order.draw(first, last - first, ())):
                taken += data.experiences(row, f"{data.name}/{prefix}/{slot}" if prefix else "")
        return taken

    def batch(self, step: int, size: int) -> list[Experience]:
        """As `SupervisedSet.batch`."""
        count = rows_of_batch(size, self.experiences_per_row)
        return self.take((step - 1) * count, count, str(step))

    def steps(self, epochs: int, size: int) -> int:
        """The fewest batches that train each row of the first set at least `epochs` times."""
        count, wanted = rows_of_batch(size, self.experiences_per_row), epochs * len(self.sets[0])
        steps = max(1, int(wanted * sum(self.shares) / self.shares[0]) // count - 1)
        while apportioned(steps * count, self.shares)[0] < wanted:
            steps += 1
        return steps
