"""Values of rows, whatever their columns mean: numbers, their JSON and Arrow forms, and why some cannot be used.

Rows pass through tokenizers, pickles, JSON and UTF-8 files. A value that would fail there is found on reading.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import sys
from decimal import Decimal
from typing import Any

from trinity_core.base.errors import DataError

MAX_DEPTH = 64
"""Limit of nested lists and objects in a row; JSON readers and writers fail at a few hundred."""

UNDECODABLE = "surrogateescape"
"""Error handler of text decoding: a byte that is not UTF-8 becomes half of a character, for which `row_problem` rejects
a row."""
OBEYED = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except the tab, ends of lines, and marks that turn the direction of text."""


def number_of(value: Any) -> float | None:
    """Return a finite number, also from text, because all CSV columns are text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(value: Any) -> str | float:
    """For `json.dumps`: dates as ISO 8601 text, exact numbers as floats. Raises DataError for other types."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise DataError(f"the row holds {type(value).__name__}, which JSON cannot hold: leave that column out")


def without_absent(value: Any) -> Any:
    """Drop keys of objects in a column whose value is null. Arrow gives each object the keys of all, with null for its
    absent ones, and writes them to JSON, so that they cannot be told from nulls of the author."""
    if isinstance(value, dict):
        return {name: without_absent(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        return [without_absent(inner) for inner in value]
    return value


def json_problem(error: ValueError | RecursionError) -> str:
    """Return why `json.loads` refused a text, phrased to follow "the line"."""
    if isinstance(error, RecursionError):
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON: {error.msg} at column {error.colno}"
    return f"holds a number of more than {sys.get_int_max_str_digits()} digits"


def row_problem(value: Any) -> str | None:
    """Return why a parsed value cannot be used, at any depth of nesting; None if it can."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for text in level:
            if isinstance(text, str) and (reason := _not_unicode(text)):
                return reason
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return None
    return f"is nested more than {MAX_DEPTH} levels deep"


def visible(text: str) -> str:
    """Return a line for a terminal or a log, with control characters escaped as in Python source."""
    return OBEYED.sub(lambda match: repr(match[0])[1:-1], text)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


def _not_unicode(text: str) -> str | None:
    """Return why a text cannot be encoded: JSON can hold half a surrogate pair (a cut emoji), UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around, code = text[max(0, error.start - 20) : error.start + 20], ord(text[error.start])
        byte = f" or the byte {code - 0xDC00:#04x}" if 0xDC80 <= code <= 0xDCFF else ""  # see `UNDECODABLE`
        return f"holds {text[error.start]!r}, half of a character{byte}, which cannot be encoded as UTF-8: {around!r}"
    return None
