"""Selectors that go through all rows of an epoch in an order of their own."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from trinity_core.data.selectors.selector import SELECTORS, TaskSelector


class EpochSelector(TaskSelector):
    """Goes through all rows, epoch after epoch, in an order that is a pure function of the epoch."""

    _cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def order(self, epoch: int) -> np.ndarray:
        """int64 [count]: the row numbers of one epoch."""
        raise NotImplementedError

    def draw(self, start: int, count: int, barred: Collection[int]) -> list[int]:
        """See `TaskSelector`. Draws do not depend on where one step ends and the next begins."""
        drawn: list[int] = []
        while len(drawn) < count:
            epoch, offset = divmod(start + len(drawn), self.rows.count)
            drawn += self._order(epoch)[offset : offset + count - len(drawn)].tolist()
        return drawn

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached[0] != epoch:
            self._cached = epoch, self.order(epoch)
        return self._cached[1]


@SELECTORS.register("sequential")
class Sequential(EpochSelector):
    """As stored."""

    def order(self, epoch: int) -> np.ndarray:
        """See `EpochSelector`."""
        return np.arange(self.rows.count)


@SELECTORS.register("shuffle")
class Shuffle(EpochSelector):
    """A new permutation each epoch."""

    def order(self, epoch: int) -> np.ndarray:
        """See `EpochSelector`."""
        return self.rows.random(epoch).permutation(self.rows.count)


@SELECTORS.register("random")
class DrawnWithReplacement(EpochSelector):
    """Drawn with replacement."""

    def order(self, epoch: int) -> np.ndarray:
        """See `EpochSelector`."""
        return self.rows.random(epoch).integers(self.rows.count, size=self.rows.count)


@SELECTORS.register("offline_easy2hard")
class EasyToHard(EpochSelector):
    """From the highest feature values to the lowest, the first column before the second; equal rows as stored.

    As in Trinity-RFT a high value means an easy task, such as the pass rate of a reference model.
    """

    columns = range(1, 100)

    def order(self, epoch: int) -> np.ndarray:
        """See `EpochSelector`: the same order each epoch."""
        return np.lexsort(tuple(-self.rows.features.T[::-1]))


@SELECTORS.register("priority")
class ByPriority(EpochSelector):
    """The rows of the highest priority first, those of equal priority in an order drawn anew each epoch."""

    columns = (1,)

    def order(self, epoch: int) -> np.ndarray:
        """See `EpochSelector`."""
        shuffled = self.rows.random(epoch).permutation(self.rows.count)
        return shuffled[np.argsort(-self.rows.features[shuffled, 0], kind="stable")]
