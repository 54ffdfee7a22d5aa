"""What makes a row unusable whatever its columns mean: JSON that cannot be read, and values that cannot be passed on.

Rows travel: through tokenizers, pickles, JSON and files of UTF-8. What would fail there is found when it is read.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_DEPTH = 64
"""Levels of lists and objects in a row; readers and writers of JSON give up at some hundreds."""


def json_problem(error: ValueError | RecursionError) -> str:
    """What is wrong with a JSON text that `json.loads` has refused; reads on from "the line"."""
    if isinstance(error, RecursionError):
        return f"is nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, json.JSONDecodeError):
        return f"is no JSON: {error.msg} at column {error.colno}"
    return f"holds a number of more than {sys.get_int_max_str_digits()} digits"


def row_problem(value: Any) -> str | None:
    """What is wrong with a value that was read, however it is nested; None where it is sound."""
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
    """JSON can spell half of a surrogate pair (a cut emoji), which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.start + 20]
        return f"holds {text[error.start]!r}, half of a character, which cannot be encoded as UTF-8: {around!r}"
    return None
