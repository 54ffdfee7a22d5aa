"""What is known of a data set: counts, lengths in tokens, duplicates, and rows as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import rejected_line


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the rows of a data set, in tokens."""

    what: str
    """What is measured, as `prompt`."""
    values: np.ndarray
    """int64 [rows]."""
    limit: int | None
    setting: str
    """The key of the limit."""
    beyond: str
    """What happens to longer ones."""

    @property
    def over(self) -> int:
        """Rows beyond the limit."""
        return 0 if self.limit is None else int((self.values > self.limit).sum())

    def quantile(self, share: float) -> int:
        """The length that this share of the rows does not exceed."""
        return int(np.quantile(self.values, share, method="inverted_cdf"))

    def histogram(self, bins: int = 12) -> list[tuple[int, int, int]]:
        """(shortest, longest, rows) of up to `bins` intervals of equal width, whose width is 1, 2 or 5 times 10^n."""
        low, high = int(self.values.min()), int(self.values.max())
        width = next(w for w in _round_widths() if high // w - low // w < bins)
        counts = np.bincount(self.values // width - low // width)
        start = low // width
        return [((start + i) * width, (start + i + 1) * width - 1, int(count)) for i, count in enumerate(counts)]


def _round_widths() -> Iterator[int]:
    scale = 1
    while True:
        yield from (scale, 2 * scale, 5 * scale)
        scale *= 10


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it."""

    location: RowLocation
    tokens: list[int]
    pieces: list[str]
    """The tokens as the tokenizer writes them."""
    spans: list[tuple[str, bool]]
    """The text in stretches with and without a loss."""
    mask: list[bool]
    """True for tokens with a loss."""


@dataclass
class DataSetReport:
    """What is known of one data set."""

    key: str
    """Where the configuration names it."""
    name: str
    path: str
    split: str
    use: str
    """`tasks`, `evaluation`, `demonstrations` or `preferences`."""
    rows: int = 0
    """Usable rows."""
    rejected: list[RejectedRow] = field(default_factory=list)
    problem: str = ""
    """Why a run would not begin with it; "" if it would."""
    lengths: list[RowLengths] = field(default_factory=list)
    duplicates: list[tuple[RowLocation, RowLocation]] = field(default_factory=list)
    """A row, and the first one that is equal: the same prompt, and the same answers if the set trains on them."""
    shared: dict[str, int] = field(default_factory=dict)
    """Rows whose prompt is also in another set, by that set's name."""
    examples: list[ShownRow] = field(default_factory=list)
    prompts: set[bytes] = field(default_factory=set)
    """Digests of the prompts' tokens."""

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {
            "key": self.key, "name": self.name, "path": self.path, "split": self.split, "use": self.use,
            "rows": self.rows, "problem": self.problem,
            "rejected": [rejected_line(row) for row in self.rejected],
            "lengths": {each.what: _lengths_json(each) for each in self.lengths},
            "duplicates": [[str(row), str(first)] for row, first in self.duplicates],
            "shared_prompts": self.shared,
            "examples": [
                {"row": str(one.location), "text": "".join(text for text, _ in one.spans), "tokens": one.tokens,
                 "loss_mask": one.mask}
                for one in self.examples
            ],
        }  # fmt: skip


def _lengths_json(lengths: RowLengths) -> dict[str, Any]:
    quantiles = {name: lengths.quantile(q) for name, q in (("min", 0), ("median", 0.5), ("p95", 0.95), ("max", 1))}
    mean = round(float(lengths.values.mean()), 1)
    limit = {"limit": lengths.limit, "limit_key": lengths.setting, "over_limit": lengths.over}
    return {**quantiles, "mean": mean, **limit, "histogram": lengths.histogram()}
