"""Expert data mixed with rollouts: data-set rows in an order that can resume at any position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import numpy as np

from trinity_core.base.errors import DataError
from trinity_core.data.experience import Experience
from trinity_core.data.supervised import SupervisedMixture


class ExpertPosition(TypedDict):
    """Position of the next expert row: `offset` rows into the order of `epoch`."""

    epoch: int
    offset: int


START = ExpertPosition(epoch=0, offset=0)


class ExpertSource(Protocol):
    """A source of expert rows; the same position always gives the same rows."""

    def take(self, rows: int, position: ExpertPosition = START) -> tuple[list[Experience], ExpertPosition]:
        """Return at least `rows` experiences from `position` on, marked `is_expert`, and the position after them."""


@dataclass(frozen=True)
class ExpertMixture:
    """Rows of several data sets by their shares; the position is the number of rows taken."""

    data: SupervisedMixture

    def take(self, rows: int, position: ExpertPosition = START) -> tuple[list[Experience], ExpertPosition]:
        start = position["offset"]
        return self.data.take(start, rows), ExpertPosition(epoch=0, offset=start + rows)


@dataclass(frozen=True)
class ExpertData:
    """`length` data-set rows; `make(i)` converts row i to its experiences, a group marked `is_expert`."""

    length: int
    make: Callable[[int], Sequence[Experience]]
    seed: int | None = None
    """Reshuffle each epoch by (seed, epoch); None: file order."""

    def take(self, rows: int, position: ExpertPosition = START) -> tuple[list[Experience], ExpertPosition]:
        """Return at least `rows` experiences from `position` on, marked `is_expert`, and the position after them.

        The same position always gives the same rows. Raises DataError if a whole epoch gives none.
        """
        batch: list[Experience] = []
        epoch, offset = position["epoch"], position["offset"]
        order = self._order(epoch)
        barren = 0
        while len(batch) < rows:
            if barren >= self.length:
                raise DataError(f"the expert data set ({self.length} rows) gives no usable experience")
            if offset >= self.length:
                epoch, offset = epoch + 1, 0
                order = self._order(epoch)
            experiences = self.make(int(order[offset]))
            barren = 0 if experiences else barren + 1
            batch += experiences
            offset += 1
        return batch, ExpertPosition(epoch=epoch, offset=offset)

    def _order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)
