"""Countdown: combine given numbers, each used once, to a target with + - * / and brackets; + and - may be signs.

Also tool calls, compared with the expected ones.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.base import Parts
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.math import tagged_answers

_PLAIN = re.compile(r"[0-9+\-*/()\s]*")
"""Characters of an expression: Python would also parse `3_9` and `0x27` as numbers."""
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ARGUMENTS = ("arguments", "parameters", "input")
"""Keys of a tool call's arguments: OpenAI's, Llama's, Anthropic's."""
MAX_LENGTH = 200
"""Length limit of an expression; a longer one is not an answer."""


@REWARD_FNS.register("countdown_reward")
def countdown_reward(
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    numbers_key: str = "nums",
    target_key: str = "target",
    format_score: float = 0.1,
    **_: Any,
) -> Parts:
    """`accuracy` 1 if the last `<answer>` reaches the target with each number used once; else `format` 0.1 if there is
    one.

    The numbers and the target are columns of the row, or keys of a reference answer that is an object or its JSON,
    where the numbers may also be called `numbers` (Trinity-RFT's data).
    """
    puzzle = _from_json(truth) if isinstance(truth, str) else truth
    source = puzzle if isinstance(puzzle, Mapping) else task
    if numbers_key not in source and "numbers" in source:
        numbers_key = "numbers"
    if numbers_key not in source or target_key not in source:
        raise DataError(f"countdown_reward needs the columns '{numbers_key}' and '{target_key}'", key=numbers_key)
    numbers, target = sorted(map(int, source[numbers_key])), Fraction(str(source[target_key]))
    answer = next((content for _start, content in tagged_answers(response)), None)
    if answer is None:
        return {"accuracy": 0.0, "format": 0.0}
    value = evaluate(answer.split("=")[0].strip())
    right = value is not None and value == (numbers, target)
    return {"accuracy": float(right), "format": 0.0 if right else format_score}


def _from_json(text: str) -> Any:
    """Parse JSON; None for other text, such as a solution in words."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def evaluate(expression: str) -> tuple[list[int], Fraction] | None:
    """Return the sorted numbers and the exact value of an arithmetic expression, None if it is not one, without running
    it."""
    if len(expression) > MAX_LENGTH or not _PLAIN.fullmatch(expression):
        return None
    numbers: list[int] = []
    try:
        value = _value(ast.parse(expression, mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return sorted(numbers), value


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, numbers), _value(right, numbers))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers)
        case _:
            raise ValueError("not a number, + - * / or a bracket")


@REWARD_FNS.register("toolcall_reward")
def toolcall_reward(*, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **_: Any) -> Parts:
    """`accuracy` 1 if the answer's calls are the expected ones with the expected arguments, in any order.

    `response` and `truth` are one or more calls `{name, arguments}`, in OpenAI's form or not, or their JSON; no call
    may be expected too. Arguments are compared as JSON values: 1 is 1.0, but neither `true` nor "1". Raises DataError
    without a reference, ValueError if it cannot be parsed.
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
    if isinstance(calls, dict):  # a message, or one call
        calls = calls.get("tool_calls") or [calls]
    if not isinstance(calls, list):
        return None
    spellings = [_spelling(_parsed(call)) for call in calls]
    return None if None in spellings else Counter(filter(None, spellings))


def _spelling(call: Any) -> str | None:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # OpenAI's form
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = _parsed(next((call[key] for key in ARGUMENTS if call.get(key)), {}))
    return json.dumps([call["name"], _plain(arguments)], sort_keys=True) if isinstance(arguments, dict) else None


def _plain(value: Any) -> Any:
    """Return a JSON value in which a whole number is always an int."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parsed(value: Any) -> Any:
    """Parse JSON, including JSON that was encoded twice."""
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                return None
    return value
