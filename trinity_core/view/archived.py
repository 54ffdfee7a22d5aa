"""Experiences that have left the store: their texts are lines of `buffer/experience_buffer.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity_core.store.archive import first_line_of, line_header


def archived_rollouts(path: Path, step: int, group: str, group_id: int) -> list[dict[str, Any]]:
    """The lines of a group in the batch of train step `step`; none if there is no such file or line.

    The lines ascend by train step, so the batch is found by bisection: nothing else is read.
    """
    if not path.exists():
        return []
    names, matching = {group, f"{group}#{group_id}"}, []
    with path.open("rb") as file:
        file.seek(first_line_of(file, step))
        for raw in file:
            header = line_header(raw)
            if header is None or header[0] > step:
                break
            if header[0] == step and header[1] in names:
                matching.append(json.loads(raw))
    return matching
