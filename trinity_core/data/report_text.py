"""The report on a data set as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trinity_core.data.files import RejectedRow
from trinity_core.data.reports import DataSetReport, RowLengths, ShownRow

LOSS, PLAIN, RED = "\033[32m", "\033[0m", "\033[31m"
BAR = 40
"""Characters of the longest bar of a histogram."""
REASONS, ROWS = 8, 3
"""Reasons that are listed, and rows for each."""
USES = {
    "tasks": "tasks to explore",
    "evaluation": "tasks for evaluation",
    "demonstrations": "answers to imitate",
    "preferences": "pairs to prefer",
}


def report_text(report: DataSetReport, colour: bool) -> str:
    """Everything but the rejected rows one by one."""
    return "\n".join(_lines(report, colour))


def _lines(report: DataSetReport, colour: bool) -> Iterator[str]:
    yield f"{report.key}  '{report.name}', {USES[report.use]}, from {report.path} ({report.split})"
    if report.problem:
        yield f"  {RED if colour else ''}unusable: {report.problem}{PLAIN if colour else ''}"
    yield f"  rows        {report.rows:,} usable, {len(report.rejected):,} set aside"
    yield from _reasons(report.rejected)
    for lengths in report.lengths:
        yield from _histogram(lengths)
    if report.duplicates:
        row, first = report.duplicates[0]
        yield f"  duplicates  {len(report.duplicates):,} equal to an earlier row, as {row} to {first}"
    else:
        yield "  duplicates  none"
    for name, count in report.shared.items():
        yield f"  shared      {count:,} prompts are also in '{name}'"
    for example in report.examples:
        yield from _example(example, colour)


def _reasons(rejected: list[RejectedRow]) -> Iterator[str]:
    """The reasons by number of rows; reasons that differ in numbers alone count as one."""
    alike: dict[str, list[RejectedRow]] = {}
    for row in rejected:
        alike.setdefault(re.sub(r"\d+", "…", row.reason), []).append(row)
    listed = sorted(alike.values(), key=len, reverse=True)
    for rows in listed[:REASONS]:
        where = ", ".join(str(row.location) for row in rows[:ROWS]) + (", …" if len(rows) > ROWS else "")
        others = ", and alike" if any(row.reason != rows[0].reason for row in rows) else ""
        yield f"    {len(rows):,} × {rows[0].reason}{others}  ({where})"
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
    """A row's text and tokens; those with a loss in colour, or between « and »."""
    begin, end = (LOSS, PLAIN) if colour else ("«", "»")
    marked = "in colour" if colour else "between « »"
    with_loss = f", {sum(row.mask)} of them with a loss ({marked})" if any(row.mask) else ", none with a loss"
    yield f"  as the model sees {row.location}: {len(row.tokens)} tokens{with_loss}"
    over_lines = f"{end}\n{begin}"
    spans = (f"{begin}{text.replace(chr(10), over_lines)}{end}" if in_loss else text for text, in_loss in row.spans)
    yield from (f"  │ {line}" for line in "".join(spans).split("\n"))
    tokens = (f"{token}:{piece}" for token, piece in zip(row.tokens, row.pieces, strict=True))
    yield "  │ " + " ".join(
        f"{begin}{token}{end}" if in_loss else token for token, in_loss in zip(tokens, row.mask, strict=True)
    )
