"""Turns (`from`, `value`), as ShareGPT's and Tool-N1's data sets have them, as messages (`role`, `content`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trinity_core.errors import DataError

ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
"""Who speaks, as a role of a message."""


def is_turn(given: Mapping[str, Any]) -> bool:
    """True for a turn, False for a message. Parquet gives each all keys of the column, with null where it has none."""
    return given.get("from") is not None and given.get("role") is None


def as_message(turn: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The message of a turn. Calls in a turn `function_call` become `tool_calls`, as chat templates take them.

    Raises DataError, which names the column `key`, for an unknown speaker.
    """
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise DataError(f"column '{key}' has a turn from {speaker!r:.80}, not one of {', '.join(ROLES)}")
    if speaker == "function_call" and (calls := _calls(value)):
        return {"role": "assistant", "content": "", "tool_calls": calls}
    return {"role": ROLES[speaker], "content": value if value is None or isinstance(value, str) else json.dumps(value)}


def _calls(value: Any) -> list[dict[str, Any]]:
    """The calls in a turn: an object with `name` and `arguments`, a list of them, or their JSON text; else none."""
    found = _read(value)
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": _read(call.get("arguments") or {})}}
        for call in calls
    ]


def _read(value: Any) -> Any:
    """JSON text as what it stands for, all else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
