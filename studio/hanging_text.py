"""Lines of columns as HTML: what does not fit into a line goes on below its last column."""

from __future__ import annotations

import re
from html import escape

LAST_COLUMN = re.compile(r"^ *(?:\S+(?: \S+)? {2,})?")
"""What stands before it: the indent, and a name or a size, which may have one space amid it."""


def hanging(text: str) -> str:
    """The text in a fixed-width font, each line with the indent of its last column where it is broken."""
    return f'<div class="hanging">{"".join(_line(line) for line in text.splitlines())}</div>'


def _line(line: str) -> str:
    found = LAST_COLUMN.match(line)
    indent = len(found[0]) if found is not None else 0
    return f'<div style="padding-left: {indent}ch; text-indent: -{indent}ch">{escape(line)}</div>'
