"""Experiences that have left the store, read from `buffer/experience_buffer.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity_core.store.archive import first_line_of, line_header


def archived_rollouts(path: Path, step: int, group: str, group_id: int) -> list[dict[str, Any]]:
    """Return a group's lines in the batch of train step `step`; empty if there are none.

    Lines are sorted by train step, so the batch is found by bisection without reading the rest.
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
