"""Statistics of a data set: counts, lengths in tokens, duplicates, and rows as the model sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity_core.data.files import RejectedRow, RowLocation
from trinity_core.data.rejected import rejected_line
from trinity_core.data.values import visible


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the rows of a data set, in tokens."""

    what: str
    """What is measured, such as `prompt`."""
    values: np.ndarray
    limit: int | None
    setting: str
    """Configuration key of the limit."""
    beyond: str
    """What happens to longer rows."""

    @property
    def over(self) -> int:
        """Number of rows beyond the limit."""
        return 0 if self.limit is None else int((self.values > self.limit).sum())

    def quantile(self, share: float) -> int:
        """Return the length that this fraction of the rows does not exceed."""
        return int(np.quantile(self.values, share, method="inverted_cdf"))

    def histogram(self, bins: int = 12) -> list[tuple[int, int, int]]:
        """Return (shortest, longest, rows) of up to `bins` intervals of equal width, which is 1, 2 or 5 times 10^n."""
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
    location: RowLocation
    tokens: list[int]
    pieces: list[str]
    """The tokens as the tokenizer writes them."""
    spans: list[tuple[str, bool]]
    """The text in stretches with and without loss."""
    mask: list[bool]


@dataclass
class DataSetReport:
    key: str
    """Configuration key of the data set."""
    name: str
    path: str
    split: str
    use: str
    """`tasks`, `evaluation`, `demonstrations` or `preferences`."""
    rows: int = 0
    rejected: list[RejectedRow] = field(default_factory=list)
    problem: str = ""
    """Why a run would refuse it; "" if it would not."""
    lengths: list[RowLengths] = field(default_factory=list)
    duplicates: list[tuple[RowLocation, RowLocation]] = field(default_factory=list)
    """A row, and the first one equal to it: the same prompt, and the same answers if the set trains on them."""
    shared: dict[str, int] = field(default_factory=dict)
    """Number of rows whose prompt is also in another set, by that set's name."""
    guess: dict[str, str] = field(default_factory=dict)
    """If no `format` is configured: keys of one that reads the first rows, unless it is the default."""
    spare: list[str] = field(default_factory=list)
    """Columns that nothing reads; a workflow may read any column of tasks."""
    unlearned: bool = False
    """True if the first rows have earlier answers, which carry no loss."""
    thoughtless: int = 0
    """Number of rows whose answer begins with an empty thought, which carries loss."""
    worded: list[RowLocation] = field(default_factory=list)
    """Rows whose reference answer is no number, formula or choice, though the reward compares mathematics."""
    examples: list[ShownRow] = field(default_factory=list)
    prompts: set[bytes] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key, "name": self.name, "path": self.path, "split": self.split, "use": self.use,
            "rows": self.rows, "problem": self.problem,
            "rejected": [rejected_line(row) for row in self.rejected],
            "lengths": {lengths.what: _lengths_json(lengths) for lengths in self.lengths},
            "duplicates": [[str(row), str(first)] for row, first in self.duplicates],
            "shared_prompts": self.shared, "guessed_format": self.guess, "spare_columns": self.spare,
            "unlearned_answers": self.unlearned, "empty_thoughts": self.thoughtless,
            "worded_references": [str(row) for row in self.worded],
            "examples": [
                {"row": str(example.location), "text": "".join(text for text, _ in example.spans),
                 "tokens": example.tokens, "loss_mask": example.mask}
                for example in self.examples
            ],
        }  # fmt: skip


def _lengths_json(lengths: RowLengths) -> dict[str, Any]:
    quantiles = {name: lengths.quantile(q) for name, q in (("min", 0), ("median", 0.5), ("p95", 0.95), ("max", 1))}
    mean = round(float(lengths.values.mean()), 1)
    limit = {"limit": lengths.limit, "limit_key": lengths.setting, "over_limit": lengths.over}
    return {**quantiles, "mean": mean, **limit, "histogram": lengths.histogram()}


LOSS, PLAIN, RED = "\033[32m", "\033[0m", "\033[31m"
BAR = 40
"""Length of the longest bar of a histogram in characters."""
REASONS, ROWS = 8, 3
EMPTY_THOUGHTS = (
    "the policy learns not to think. With model.enable_thinking: false the template writes it in the prompt, where it "
    "has no loss"
)
USES = {
    "tasks": "tasks to explore",
    "evaluation": "tasks for evaluation",
    "demonstrations": "answers to imitate",
    "preferences": "pairs to prefer",
}


def report_text(report: DataSetReport, colour: bool) -> str:
    """Return the report without the individual rejected rows."""
    return "\n".join(_lines(report, colour))


def _lines(report: DataSetReport, colour: bool) -> Iterator[str]:
    yield visible(f"{report.key}  '{report.name}', {USES[report.use]}, from {report.path} ({report.split})")
    if report.guess:
        keys = ", ".join(f"{name}: {column}" for name, column in report.guess.items())
        yield f"  no format is given; by its columns this one fits:  format: {{{visible(keys)}}}"
    if report.spare:
        yield f"  not read: {visible(', '.join(report.spare))}"
    if report.unlearned:
        yield "  only last answers carry loss; format.enable_concatenated_multi_turn: true adds the earlier ones"
    if report.thoughtless:
        yield f"  {report.thoughtless:,} answers begin with an empty thought, which carries loss: {EMPTY_THOUGHTS}"
    if report.problem:
        yield f"  {RED if colour else ''}unusable: {visible(report.problem)}{PLAIN if colour else ''}"
    yield f"  rows        {report.rows:,} usable, {len(report.rejected):,} rejected"
    yield from _reasons(report.rejected)
    for lengths in report.lengths:
        yield from _histogram(lengths)
    if report.duplicates:
        row, first = report.duplicates[0]
        yield f"  duplicates  {len(report.duplicates):,} equal to an earlier row, as {row} to {first}"
    else:
        yield "  duplicates  none"
    if report.worded:
        where = ", ".join(map(str, report.worded[:ROWS])) + (", …" if len(report.worded) > ROWS else "")
        yield f"  references  {len(report.worded):,} are neither a number nor a formula nor a choice  ({where})"
    for name, count in report.shared.items():
        yield visible(f"  shared      {count:,} prompts are also in '{name}'")
    for example in report.examples:
        yield from _example(example, colour)


def _reasons(rejected: list[RejectedRow]) -> Iterator[str]:
    """Yield the reasons by number of rows; reasons that differ only in numbers are merged."""
    alike: dict[str, list[RejectedRow]] = {}
    for row in rejected:
        alike.setdefault(re.sub(r"\d+", "…", row.reason), []).append(row)
    listed = sorted(alike.values(), key=len, reverse=True)
    for rows in listed[:REASONS]:
        where = ", ".join(str(row.location) for row in rows[:ROWS]) + (", …" if len(rows) > ROWS else "")
        others = ", and alike" if any(row.reason != rows[0].reason for row in rows) else ""
        yield visible(f"    {len(rows):,} × {rows[0].reason}{others}  ({where})")
    if len(listed) > REASONS:
        yield f"    and {len(listed) - REASONS} more reasons"


def _histogram(lengths: RowLengths) -> Iterator[str]:
    shares = {"shortest": 0.0, "median": 0.5, "95 %": 0.95, "longest": 1.0}
    yield f"  {lengths.what}, in tokens: " + ", ".join(f"{n} {lengths.quantile(q):,}" for n, q in shares.items())
    if lengths.limit is not None:
        beyond = f": {lengths.beyond}" if lengths.over else ""
        yield f"    {lengths.over:,} beyond {lengths.setting} = {lengths.limit:,}{beyond}"
    bins = lengths.histogram()
    most = max(count for _, _, count in bins)
    for low, high, count in bins:
        bar = "█" * -(-count * BAR // most)
        yield f"    {low:>7,} – {high:<7,} {count:>9,} {bar}"


def _example(row: ShownRow, colour: bool) -> Iterator[str]:
    """Yield a row's text and tokens; those with loss in colour, or between « and »."""
    begin, end = (LOSS, PLAIN) if colour else ("«", "»")
    marked = "in colour" if colour else "between « »"
    with_loss = f", {sum(row.mask)} of them with a loss ({marked})" if any(row.mask) else ", none with a loss"
    yield f"  as the model sees {row.location}: {len(row.tokens)} tokens{with_loss}"
    over_lines = f"{end}\n{begin}"
    shown = [("\n".join(map(visible, text.split("\n"))), in_loss) for text, in_loss in row.spans]
    spans = (f"{begin}{text.replace(chr(10), over_lines)}{end}" if in_loss else text for text, in_loss in shown)
    yield from (f"  │ {line}" for line in "".join(spans).split("\n"))
    tokens = (f"{token}:{visible(piece)}" for token, piece in zip(row.tokens, row.pieces, strict=True))
    yield "  │ " + " ".join(
        f"{begin}{token}{end}" if in_loss else token for token, in_loss in zip(tokens, row.mask, strict=True)
    )
