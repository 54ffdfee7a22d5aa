"""Experiences that have left the store: their texts are lines of `buffer/experience_buffer.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

SHORT = 4096
"""Bytes: where so few are left, lines are read one by one."""


def archived_rollouts(path: Path, step: int, group: str, group_id: int) -> list[dict[str, Any]]:
    """The lines of a group in the batch of train step `step`; none if there is no such file or line.

    The lines ascend by train step, so the batch is found by bisection: nothing else is read.
    """
    if not path.exists():
        return []
    names, matching = {group, f"{group}#{group_id}"}, []
    with path.open("rb") as file:
        file.seek(_begin(file, step, path.stat().st_size))
        for raw in file:
            line = _line(raw)
            if line is None or line["step"] > step:
                break
            if line["step"] == step and line["group"] in names:
                matching.append(line)
    return matching


def _begin(file: IO[bytes], step: int, size: int) -> int:
    """The beginning of a line before the first one of `step`, or of that line."""
    low, high = 0, size
    while high - low > SHORT:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        start = file.tell()
        line = _line(file.readline())
        if start >= high or line is None or line["step"] >= step:
            high = middle
        else:
            low = start
    return low


def _line(raw: bytes) -> dict[str, Any] | None:
    """A line; None for one that is cut short or missing."""
    return json.loads(raw) if raw.endswith(b"\n") else None
