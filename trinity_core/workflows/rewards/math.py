"""Rewards for answers that are numbers or formulas, compared by math-verify.

The final answer is only what a response declares: the text after its last `####` on that line (GSM8K's own form), the
content of its last `\\boxed{}`, or that of its last nonempty `<answer>`, whichever is later. A number that merely
occurs is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from trinity_core.errors import DataError
from trinity_core.workflows.rewards.base import FAST_PATHS, REWARD_FNS, WARM_UPS, Parts

_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_OPEN, _CLOSE, _THINK = "<answer>", "</answer>", "<think>"
_FROM_THOUGHT_TO_ANSWER = re.compile(r"</think>\s*<answer>")
_BOX = "\\boxed{"
_TEXT = re.compile(r"\\(?:text|math)(?:rm|bf|it|normal)?\s*\{([^{}]*)\}")
_WRAPPING = re.compile(r"(?:\bUS)?\\?\$|[€£¥₹]|(?<!\\)\\[()\[\]]")
_MARKS = re.compile(r"\*\*|__|`|\\approx|\\[,!;:]|\\(?=[% ])")
_LETTER = "[^\\W\\d_²³½¼¾⅓⅔半一二三四五六七八九十百千万亿萬億]"
_WORD = rf"(?:{_LETTER}(?:['’-]?{_LETTER})+['’]?(?!{_LETTER})|\b[ai](?=\s+{_LETTER}))"
_SCALES = {"half": 0.5, "quarter": 0.25, "dozen": 12, "hundred": 100, "thousand": 1000, "million": 1e6, "billion": 1e9}
_SENTENCE = re.compile(
    rf"(?i)((?:{_WORD}[\s:=,.]+|[=≈(]\s*)*+)"
    r"([-+−–]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+))"
    rf"(?:\s*({'|'.join(_SCALES)})s?\b-?)?"
    rf"((?:[\s(]*(?:/?{_WORD}|(?-i:[mg])(?!{_LETTER})|[°¢%](?:\s?[CF]\b)?)(?:\^?\{{?[23²³]\}}?)?(?:/[a-z]\b)?[),.:]*)*+\.?)"
)
_OTHER_NUMBER = re.compile(
    r"(?i)\b(not?|nor|never|\w+n['’]t|or|minus|negative|plus|log|ln|exp|sin|cos|tan|sqrt|root|mod|pi|twice|double|triple|"
    r"squared|cubed|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|halves|thirds?|quarters?|"
    r"(twen|thir|four|for|fif|six|seven|eigh|nine)(teen|ty)|(four|fif|six|seven|eigh|nin|ten)ths?|dozens?|lakhs?|crores?|"
    r"(hundred|thousand|million|billion|trillion)(s|ths?)?|grand(?! total)|point(?=\s+\w)|"
    r"(times|than|over|under|below|above|least|most|up to)(?=\s+0))\b"
)
"""Words that change the meaning of an adjacent number (0 here): numbers, operations and bounds."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")


def final_answer(text: str) -> str | None:
    """Return the final answer that a text declares, stripped; None if it declares none or an empty one."""
    declared = [(match.start(), _outside_tags(match[1])) for match in _HASHES.finditer(text)][-1:]
    declared += next(([(start, answer)] for start, answer in tagged_answers(text) if answer), [])
    start, answer = max(declared, default=(-1, ""))
    box = text.rfind(_BOX)
    return braced(text, box + len(_BOX)) if box > start else answer or None


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
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip() or None
    return None


def reference(truth: Any) -> str:
    """Return the reference answer of a row: its declared final answer, else all of it. Raises DataError if empty."""
    text = "" if truth is None else str(truth).strip()
    answer = final_answer(text) or text
    if not answer:
        raise DataError(
            "the row has no reference answer to compare with; set format.response_key to its column",
            key="format.response_key",
        )
    return answer


def same(answer: str, truth: str, question: str = "") -> bool:
    """True if math-verify considers two expressions equal. Raises ValueError if it cannot parse the reference."""
    from math_verify import LatexExtractionConfig, parse, verify

    # The pool's timeout replaces math-verify's own. A formula that LaTeX cannot parse has no number to extract.
    read = partial(parse, parsing_timeout=None, raise_on_error=True)
    formula = partial(read, extraction_config=[LatexExtractionConfig(try_extract_without_anchor=False)])
    agree = partial(verify, timeout_seconds=None, raise_on_error=True)
    gold = read(f"{_BOX}{truth}}}")
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {truth!r}")
    return any(agree(gold, formula(f"{_BOX}{reading}}}")) for reading in readings(answer, question))


def readings(answer: str, question: str) -> list[str]:
    """Return the formulas that an answer may stand for: all of it and, if it is words around one number, that number.

    A dozen, thousand… after the number multiplies it, unless the question asks "how many dozen" or "in thousands". If a
    word changes the number's meaning ("18 and a half", "less than 18"), the number is not included.
    """
    answer = _WRAPPING.sub("", answer)
    plain = _MARKS.sub("", _TEXT.sub(r"\1", answer.replace("{,}", ",")).replace("~", " ")).strip()
    match = _SENTENCE.fullmatch(plain)
    if not match:
        return [answer]
    before, number, scale, after = match.groups()
    if _OTHER_NUMBER.search(f"{before}0{after}"):
        return [plain]
    number = re.sub("[−–]", "-", number)
    if scale and not re.search(rf"\b(how many ([\w'-]+ ){{0,3}}{scale}|in {scale}s\b)", question, re.IGNORECASE):
        number += rf" \cdot {_SCALES[scale.lower()]}"
    return [plain, number]


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
    """Return `math_reward`'s verdict if it needs no verifier: no declared answer, or two plain integers."""
    gold = reference(truth)
    answer = final_answer(response)
    right = plain_verdict(answer, gold)
    return None if right is None else _parts(right, answer, response, format_weight, think_score)


def plain_verdict(answer: str | None, gold: str) -> bool | None:
    """Return the verdict if it needs no verifier: there is no answer, or both are plain integers. Otherwise None."""
    if answer is None:
        return False
    return int(answer) == int(gold) if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold) else None


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
