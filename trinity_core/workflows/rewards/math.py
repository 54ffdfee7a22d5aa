"""Rewards for answers that are numbers or formulas, compared by math-verify.

The final answer is what a response says it is, and nothing else: the text after its last `####` on that line (GSM8K's
own form), the content of its last `\\boxed{}`, or that of its last `<answer>` that is not empty, whichever stands
later. A number that merely occurs is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.base import FAST_PATHS, REWARD_FNS, WARM_UPS, Parts

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_OPEN, _CLOSE = "<answer>", "</answer>"
_THINK = "<think>"
_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s*<answer>")
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
    declared = [(found.start(), _outside_tags(found[1])) for found in _HASHES.finditer(text)][-1:]
    declared += next(([(start, answer)] for start, answer in tagged_answers(text) if answer), [])
    start, answer = max(declared, default=(-1, ""))
    box = text.rfind(_BOX)
    return braced(text, box + len(_BOX)) if box > start else answer or None


def tagged_answers(text: str) -> Iterator[tuple[int, str]]:
    """Start and stripped content of each `<answer>…</answer>`, the last one first.

    Time is linear in the text, whatever a policy writes: fast paths run in the explorer's own process, where
    `<answer>.*?</answer>` would hold up all rollouts for a response that opens the tag ten thousand times.
    """
    end = len(text)
    while (close := text.rfind(_CLOSE, 0, end)) >= 0 and (start := text.rfind(_OPEN, 0, close)) >= 0:
        content = start + len(_OPEN)
        yield start, text[content : text.find(_CLOSE, content)].strip()
        end = start


def _outside_tags(line: str) -> str:
    """What follows `####` up to a closing tag, as in `<answer>#### 18</answer>.`"""
    return line.partition(_CLOSE)[0].replace(_OPEN, "").strip()


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
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    format_weight: float = 0.0,
    think_score: float = 0.0,
    **_: Any,
) -> Parts:
    """`accuracy` 1 where the declared final answer equals the reference, else 0.

    With a `format_weight`, `format` adds that much wherever a final answer is declared. With a `think_score`,
    `format_score` is that much for a response of the form `<think>…</think> <answer>…</answer>`, else minus as much.
    """
    gold = reference(truth)
    answer = final_answer(response)
    right = answer is not None and same(answer, gold)
    return _parts(right, answer is not None, format_weight) | _thought(response, think_score)


def math_fast(
    *, response: str, truth: Any, format_weight: float = 0.0, think_score: float = 0.0, **_: Any
) -> Parts | None:
    """The same verdict without a verifier: no declared answer, or two plain integers."""
    gold = reference(truth)
    answer = final_answer(response)
    right = plain_verdict(answer, gold)
    if right is None:
        return None
    return _parts(right, answer is not None, format_weight) | _thought(response, think_score)


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


def _thought(response: str, score: float) -> Parts:
    return {"format_score": score if _is_thought(response) else -score} if score else {}


def _is_thought(response: str) -> bool:
    """True for `<think>…</think> <answer>…</answer>`, with any text before. Linear, as `tagged_answers`."""
    text = response.rstrip()
    think = text.find(_THINK)
    if think < 0 or not text.endswith(_CLOSE):
        return False
    return bool(_FROM_THOUGHT_TO_ANSWER.search(text, think + len(_THINK), len(text) - len(_CLOSE)))


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
        match = re.search(pattern, response, re.DOTALL) if pattern else final_answer(response)
    except re.error as error:
        raise DataError(f"format_reward cannot read the pattern {pattern!r}: {error}") from error
    return {"format": miss_score if match is None else match_score}
