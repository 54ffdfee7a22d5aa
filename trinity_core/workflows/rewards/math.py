"""Rewards for answers that are numbers or formulas, compared by math-verify.

The final answer is what a response says it is, and nothing else: the text after its last `####` on that line (GSM8K's
own form), or the content of its last `\\boxed{}`, whichever stands later. A number that merely occurs is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.base import FAST_PATHS, REWARD_FNS, WARM_UPS, Parts

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_BOX = "\\boxed{"
_MARKS = re.compile(r"\*\*|__|[$€£¥]")
_WORD = r"[^\W\d_]{2,}"
_SENTENCE = re.compile(rf"(?:{_WORD}[:,]?\s+)*([-+]?\d[\d,]*(?:\.\d+)?)(?:\s*\(?{_WORD}\)?[,.]?)*\.?")
_MEANING = re.compile(
    r"\b(not?|minus|negative|plus|times|log|ln|exp|sin|cos|tan|sqrt|half|twice|double|mod|squared|cubed|dozens?|"
    r"hundreds?|thousands?|millions?|billions?|trillions?)\b",
    re.IGNORECASE,
)
"""Words that make another number of the one beside them."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")


def final_answer(text: str) -> str | None:
    """The final answer that a text declares, stripped; None if it declares none or an empty one."""
    hashes = max(_HASHES.finditer(text), key=re.Match.start, default=None)
    box = text.rfind(_BOX)
    if box > (hashes.start() if hashes else -1):
        return braced(text, box + len(_BOX))
    return (hashes.group(1).strip() or None) if hashes else None


def braced(text: str, start: int) -> str | None:
    """The text up to the brace that closes an already open one."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip() or None
    return None


def reference(truth: Any) -> str:
    """The reference answer of a row: its declared final answer, else the whole of it. Raises DataError where empty."""
    text = "" if truth is None else str(truth).strip()
    answer = final_answer(text) or text
    if not answer:
        raise DataError("the row has no reference answer to compare with; set format.response_key to its column")
    return answer


def same(answer: str, truth: str) -> bool:
    """Whether math-verify takes two expressions for the same. Raises ValueError if it cannot read the reference.

    The answer is read as a formula, all of it; where it is words around one number ("18 dollars.", "**18**"), as that.
    The pool's time-out takes the place of math-verify's own.
    """
    from math_verify import parse, verify

    read = partial(parse, parsing_timeout=None, raise_on_error=True)
    agree = partial(verify, timeout_seconds=None, raise_on_error=True)
    gold = read(_boxed(truth))
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {truth!r}")
    number = number_in(answer)
    return bool(agree(gold, read(_boxed(answer))) or (number and agree(gold, read(_boxed(number)))))


def number_in(answer: str) -> str | None:
    """The number of an answer that is otherwise words, units and marks; None if it may be mathematics."""
    found = _SENTENCE.fullmatch(_MARKS.sub("", answer).strip())
    return found[1] if found and not _MEANING.search(answer) else None


def _boxed(formula: str) -> str:
    return f"{_BOX}{formula}}}"


@REWARD_FNS.register("math_reward")
@REWARD_FNS.register("accuracy_reward")
def math_reward(
    *, prompt: str, response: str, truth: Any, task: Mapping[str, Any], format_weight: float = 0.0, **_: Any
) -> Parts:
    """`accuracy` 1 where the declared final answer equals the reference, else 0.

    With a `format_weight`, `format` adds that much wherever a final answer is declared.
    """
    gold = reference(truth)
    answer = final_answer(response)
    return _parts(answer is not None and same(answer, gold), answer is not None, format_weight)


def math_fast(*, response: str, truth: Any, format_weight: float = 0.0, **_: Any) -> Parts | None:
    """The same verdict without a verifier: no declared answer, or two plain integers."""
    gold = reference(truth)
    answer = final_answer(response)
    right = plain_verdict(answer, gold)
    return None if right is None else _parts(right, answer is not None, format_weight)


def plain_verdict(answer: str | None, gold: str) -> bool | None:
    """Whether an answer is right where no verifier is needed to tell: there is none, or both are plain integers."""
    if answer is None:
        return False
    return int(answer) == int(gold) if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold) else None


FAST_PATHS["math_reward"] = FAST_PATHS["accuracy_reward"] = math_fast
WARM_UPS["math_reward"] = WARM_UPS["accuracy_reward"] = lambda: same("\\frac{1}{2}", "0.5")


def _parts(right: bool, declared: bool, format_weight: float) -> Parts:
    parts = {"accuracy": float(right)}
    return parts | {"format": format_weight * declared} if format_weight else parts


@REWARD_FNS.register("format_reward")
def format_reward(
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    pattern: str | None = None,
    match_score: float = 1.0,
    miss_score: float = 0.0,
    **_: Any,
) -> Parts:
    """`format` 1 where a final answer is declared, or with a `pattern` where that regular expression finds a match.

    `match_score` and `miss_score` take the place of 1 and 0. Raises DataError for a pattern that is none.
    """
    try:
        found = re.search(pattern, response, re.DOTALL) if pattern else final_answer(response)
    except re.error as error:
        raise DataError(f"format_reward cannot read the pattern {pattern!r}: {error}") from error
    return {"format": miss_score if found is None else match_score}
