"""Values of columns: which read as numbers, and what JSON makes of those that a table may hold."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from typing import Any

from trinity_core.errors import DataError


def number_of(value: Any) -> float | None:
    """A finite number, or text that reads as one, as all columns of a CSV file are text; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(value: Any) -> str | float:
    """For `json.dumps`: dates as ISO 8601 text, exact numbers as floats. Raises DataError for what is no text."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise DataError(f"the row holds {type(value).__name__}, which JSON cannot hold: leave that column out")
