"""Display texts for states, times and numbers."""

from __future__ import annotations

import re
from html import escape
from typing import Literal

from trinity_core.exchange.tracking.run_record import RunState

COLOURS: dict[RunState, Literal["gray", "blue", "orange", "green", "red"]] = {
    RunState.RUNNING: "blue", RunState.STOPPING: "orange", RunState.FINISHED: "green",
    RunState.PAUSED: "orange", RunState.FAILED: "red", RunState.KILLED: "red",
}  # fmt: skip


def escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_[]:$<>~#|" else letter for letter in text)


LAST_COLUMN = re.compile(r"^ *(?:\S+(?: \S+)? {2,})?")
"""Matches the text before the last column: the indent, and a name or a size, which may contain single spaces."""


def hanging(text: str) -> str:
    """Format text in a fixed-width font; broken lines get the indent of their last column."""
    lines = []
    for line in text.splitlines():
        indent = len(line) - len(LAST_COLUMN.sub("", line))
        lines.append(f'<div style="padding-left: {indent}ch; text-indent: -{indent}ch">{escape(line)}</div>')
    return f'<div class="hanging">{"".join(lines)}</div>'
