"""Checks of a row that do not depend on what its columns mean: readable JSON, encodable text, limited nesting.

Rows pass through tokenizers, pickles, JSON and UTF-8 files. A value that would fail there is found on reading.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_DEPTH = 64
"""Levels of lists and objects in a row; JSON readers and writers fail at a few hundred."""


def json_problem(error: ValueError | RecursionError) -> str:
    """The reason why `json.loads` refused a text, phrased to follow "the line"."""
    if isinstance(error, RecursionError):
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error.msg} at column {error.colno}"
    return f"holds a number of more than {sys.get_int_max_str_digits()} digits"


def row_problem(value: Any) -> str | None:
    """The reason why a parsed value cannot be used, at any depth of nesting; None if it can."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for text in level:
            if isinstance(text, str) and (reason := _not_unicode(text)):
                return reason
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return None
    return f"is nested more than {MAX_DEPTH} levels deep"


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


def _not_unicode(text: str) -> str | None:
    """The reason if a text cannot be encoded: JSON can hold half a surrogate pair (a cut emoji), UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        return f"holds {text[error.start]!r}, half of a character, which cannot be encoded as UTF-8: {around!r}"
    return None
