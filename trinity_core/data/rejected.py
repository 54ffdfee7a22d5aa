"""Rejected rows: logged, written to the run's folder with file, line and reason, and refused if there are too many."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from trinity_core.base.errors import DataError
from trinity_core.base.files import private_folder, when_room, write_atomically
from trinity_core.config.schema import Config
from trinity_core.data.files import RejectedRow

logger = logging.getLogger(__name__)

LISTED = 5
"""Number of reasons listed in messages, each with a row; the rest are counted."""


FAILED_IN_A_ROW = 8
"""Number of consecutive failed tasks that rows alone do not explain: a step with a task or two may have only bad
rows."""


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Handles the rows of a data set that cannot be used."""

    max_share: float = 1.0
    """Largest fraction of a data set's rows that may be rejected."""
    folder: Path | None = None
    """Folder for each data set's rejected rows, as `<name>.jsonl`; None: they are only logged."""

    @classmethod
    def of(cls, config: Config, reader: str) -> RejectedRows:
        """Return the rejected rows of a run; `reader` is the explorer or trainer that reads the data sets."""
        folder = config.layout.rejected_rows / quote(reader, safe="")
        return cls(config.buffer.max_rejected_share, folder)

    def settle(self, name: str, rejected: Sequence[RejectedRow], kept: int) -> None:
        """Log and write the rejected rows of a data set that has `kept` rows left.

        Raises DataError, naming the first rows and reasons, if none is left or more than `max_share` are rejected.
        """
        path = self.write(name, rejected)
        if problem := self.problem(name, rejected, kept):
            raise DataError(problem, key=name)
        if rejected:
            counted, where = _count_text(rejected, kept), f"; all of them in {path}" if path else ""
            logger.warning("Data set '%s': %s rejected: %s%s", name, counted, list_rejected(rejected), where)

    def problem(self, name: str, rejected: Sequence[RejectedRow], kept: int) -> str:
        """Return why a data set with `kept` rows left cannot be used; "" if it can."""
        if not kept:
            return f"data set '{name}' has no usable row: {list_rejected(rejected) or 'it is empty'}"
        if len(rejected) <= self.max_share * (len(rejected) + kept):
            return ""
        return (
            f"data set '{name}': {_count_text(rejected, kept)} cannot be used, more than buffer.max_rejected_share = "
            f"{self.max_share:g} allows: {list_rejected(rejected)}. `trinity data check` shows what is wrong"
        )

    def append(self, name: str, rejected: Sequence[RejectedRow]) -> None:
        """Log rows that turned out to be bad during the run, and add them to `<name>.jsonl`."""
        for row in rejected:
            logger.warning("rejected: %s", row)
        if self.folder is not None and rejected:
            path = self.folder / f"{quote(name, safe='')}.jsonl"
            when_room(lambda: _append(path, rejected), path)

    def write(self, name: str, rejected: Sequence[RejectedRow]) -> Path | None:
        """Write the file of rejected rows and return it; without any, delete the file of an earlier start and return
        None."""
        if self.folder is None:
            return None
        folder, path = self.folder, self.folder / f"{quote(name, safe='')}.jsonl"
        if not rejected:
            path.unlink(missing_ok=True)
            return None
        when_room(lambda: private_folder(folder), folder)
        write_atomically(path, _lines(rejected), durable=False)
        return path


def _lines(rejected: Sequence[RejectedRow]) -> bytes:
    lines = (json.dumps(rejected_line(row), ensure_ascii=False) + "\n" for row in rejected)
    return "".join(lines).encode(errors="backslashreplace")


def _append(path: Path, rejected: Sequence[RejectedRow]) -> None:
    private_folder(path.parent)
    with path.open("ab") as file:
        file.write(_lines(rejected))


def _count_text(rejected: Sequence[RejectedRow], kept: int) -> str:
    return f"{len(rejected)} of {len(rejected) + kept} rows"


def rejected_line(row: RejectedRow) -> dict[str, str | int]:
    return {"source": row.location.source, "line": row.location.line, "reason": row.reason}


def list_rejected(rejected: Sequence[RejectedRow]) -> str:
    """Return one line with each reason and its first row, and the number of reasons left out."""
    rows = Counter(row.reason for row in rejected)
    first = {row.reason: row for row in reversed(rejected)}
    alike = {reason: f" (as in {count - 1:,} more)" if count > 1 else "" for reason, count in rows.items()}
    listed = [f"{first[reason]}{alike[reason]}" for reason in [*rows][:LISTED]]
    return "; ".join(listed) + (f"; and {len(rows) - LISTED} more reasons" if len(rows) > LISTED else "")
