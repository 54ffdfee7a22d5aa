"""Compares tool calls with the expected calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.base import REWARD_FNS, Parts


@REWARD_FNS.register("toolcall_reward")
def toolcall_reward(*, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **_: Any) -> Parts:
    """`accuracy` 1 if the answer's calls are the expected ones with the expected arguments, in any order.

    `response` and `truth` are lists of `{name, arguments}`, or their JSON; no call may be expected too. Raises
    DataError without a reference, ValueError if it cannot be parsed.
    """
    if truth is None:
        raise DataError("toolcall_reward needs the expected calls as the reference answer (format.response_key)")
    expected = _calls(truth)
    if expected is None:
        raise ValueError(f"the reference is not a list of calls (name, arguments): {truth!r:.80}")
    return {"accuracy": float(_calls(response) == expected)}


def _calls(value: Any) -> Counter[str] | None:
    """Count calls in a canonical spelling; None if they cannot be parsed."""
    calls = _parsed(value)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return Counter(json.dumps([call["name"], _parsed(call.get("arguments") or {})], sort_keys=True) for call in calls)


def _parsed(value: Any) -> Any:
    """Parse JSON, including JSON that was encoded twice."""
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                return None
    return value
