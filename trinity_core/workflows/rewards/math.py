"""Rewards for answers that are numbers or formulas, compared by math-verify.

The final answer is only what a response declares: the text after its last `####` on that line (GSM8K's own form), the
content of its last `\\boxed{}`, or that of its last nonempty `<answer>`, whichever is later. A number that merely
occurs is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.data.messages import short
from trinity_core.workflows.rewards.answers import read, same, without_verifier
from trinity_core.workflows.rewards.base import FAST_PATHS, WARM_UPS, Parts
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.spelling import plain

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_OPEN, _CLOSE, _THINK = "<answer>", "</answer>", "<think>"
_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s*<answer>")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|[ \t]+(?=((?![A-Za-z]{2})[^\s${][^\s$]*)))")
_OBJECT = re.compile(r"\{\s*[\"']\w+[\"']\s*:")
"""Matches the beginning of an object as JSON or Python text."""
_HEADING = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")


def final_answer(text: str) -> str | None:
    """Return the final answer that a text declares, stripped; None if it declares none or an empty one.

    A line `#### Check` after a box or `<answer>` is a heading.
    """
    start, answer = next(((start, answer) for start, answer in tagged_answers(text) if answer), (-1, ""))
    box, content = last_box(text)
    if box > start:
        start, answer = box, content or ""
    hashes = max(_HASHES.finditer(text), key=re.Match.start, default=None)
    line = _outside_tags(hashes[1]) if hashes and hashes.start() > start else ""
    return (answer if not line or (answer and _HEADING.search(line)) else line) or None


def tagged_answers(text: str) -> Iterator[tuple[int, str]]:
    """Yield start and stripped content of each `<answer>…</answer>`, last one first.

    Takes linear time whatever a policy writes: fast paths run in the explorer's own process, where
    `<answer>.*?</answer>` would block all rollouts for a response that opens the tag ten thousand times.
    """
    end = len(text)
    while (close := text.rfind(_CLOSE, 0, end)) >= 0 and (start := text.rfind(_OPEN, 0, close)) >= 0:
        content = start + len(_OPEN)
        yield start, text[content : text.find(_CLOSE, content)].strip()
        end = start


def _outside_tags(line: str) -> str:
    """Return what follows `####` up to a closing tag, as in `<answer>#### 18</answer>.`"""
    return line.partition(_CLOSE)[0].replace(_OPEN, "").strip()


def braced(text: str, start: int) -> str | None:
    """Return the text up to the brace that closes an already open one."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip() or None
    return None


def last_box(text: str) -> tuple[int, str | None]:
    """Return where the last `\\boxed{}` or `\\fbox{}` (also `\\boxed 5`) begins, and its content, None if empty.

    Without one, return -1 and None.
    """
    last = max(_BOX.finditer(text), key=re.Match.start, default=None)
    return (-1, None) if last is None else (last.start(), last[1] or braced(text, last.end()))


def _declared(truth: Any) -> str:
    if isinstance(truth, list | tuple) and len(truth) == 1:
        [truth] = truth
    text = "" if truth is None else str(truth).strip()
    if isinstance(truth, Mapping | list | tuple) or _OBJECT.match(text):
        raise DataError(
            f"the reference answer must be one text or number, not {short(truth)}; set format.response_key to a column "
            "or field that holds one, such as reward_model.ground_truth",
            key="format.response_key",
        )
    return final_answer(text) or text


def reference(truth: Any) -> str:
    """Return the reference answer of a row: its declared final answer, else all of it.

    Raises DataError if it is empty, NaN, as columns of floats have it for a missing number, or an object or a list:
    which of its values is meant, and whether one or all of them, is not known.
    """
    answer = _declared(truth)
    if answer.lower() in ("", "nan"):
        raise DataError(
            "the row has no reference answer to compare with; set format.response_key to its column",
            key="format.response_key",
        )
    return answer


def reference_kind(truth: Any) -> str:
    """Return the kind of a reference answer: a key of `answers.KINDS`; `choice` for several letters too."""
    answer = read(plain(_declared(truth)))
    return "choice" if answer.kind == "text" and re.fullmatch("[A-Z]+", answer.text) else answer.kind


@REWARD_FNS.register("math_reward")
@REWARD_FNS.register("accuracy_reward")
def math_reward(
    *, prompt: str, response: str, truth: Any, format_weight: float = 0.0, think_score: float = 0.0, **_: Any
) -> Parts:
    """`accuracy` 1 if the declared final answer equals the reference, else 0.

    With a `format_weight`, `format` adds that much if a final answer is declared. With a `think_score`, `format_score`
    is that much for a response of the form `<think>…</think> <answer>…</answer>`, else minus that much.
    """
    gold = reference(truth)
    answer = final_answer(response)
    right = answer is not None and same(answer, gold, prompt)
    return _parts(right, answer, response, format_weight, think_score)


def math_fast(
    *, response: str, truth: Any, format_weight: float = 0.0, think_score: float = 0.0, **_: Any
) -> Parts | None:
    """Return `math_reward`'s verdict if it needs no verifier: no declared answer, or two plain numbers."""
    gold = reference(truth)
    answer = final_answer(response)
    right = plain_verdict(answer, gold)
    return None if right is None else _parts(right, answer, response, format_weight, think_score)


def plain_verdict(answer: str | None, gold: str) -> bool | None:
    """Return the verdict if it needs no verifier: there is no answer, or both are plain numbers. Otherwise None."""
    return False if answer is None else without_verifier(answer, gold)


vars(math_reward)["reference_kind"] = reference_kind
FAST_PATHS["math_reward"] = FAST_PATHS["accuracy_reward"] = math_fast
WARM_UPS["math_reward"] = WARM_UPS["accuracy_reward"] = lambda: same("\\frac{1}{2}", "0.5")


def _parts(right: bool, answer: str | None, response: str, format_weight: float, think_score: float) -> Parts:
    parts = {"accuracy": float(right)}
    if format_weight:
        parts["format"] = format_weight * (answer is not None)
    if think_score:
        parts["format_score"] = think_score if _is_thought(response) else -think_score
    return parts


def _is_thought(response: str) -> bool:
    """True for `<think>…</think> <answer>…</answer>`, with any text before. Linear time, like `tagged_answers`."""
    text = response.rstrip()
    think = text.find(_THINK)
    if think < 0 or not text.endswith(_CLOSE):
        return False
    return bool(_FROM_THOUGHT_TO_ANSWER.search(text, think + len(_THINK), len(text) - len(_CLOSE)))


@REWARD_FNS.register("format_reward")
def format_reward(
    *, response: str, pattern: str | None = None, match_score: float = 1.0, miss_score: float = 0.0, **_: Any
) -> Parts:
    """`format` 1 if a final answer is declared, or with a `pattern` if that regular expression matches.

    `match_score` and `miss_score` replace 1 and 0. Raises DataError for an invalid pattern.
    """
    try:
        match = re.search(pattern, response, re.DOTALL) if pattern else final_answer(response)
    except re.error as error:
        raise DataError(f"format_reward cannot read the pattern {pattern!r}: {error}", key="pattern") from error
    return {"format": miss_score if match is None else match_score}
