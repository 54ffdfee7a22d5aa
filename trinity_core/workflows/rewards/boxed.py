"""Rewards for answers in a form that a data set requests: in a box, or after "Answer:".

Like `math_reward`, they compare with math-verify; only the place of the final answer differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.answers import same
from trinity_core.workflows.rewards.base import FAST_PATHS, WARM_UPS, Parts
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.math import last_box, plain_verdict, reference, reference_kind

_ANSWER_LINE = re.compile(r"answer[*_ \t]*[:：](?:[*_$\s]|\\[\[(])*([^\n]+)", re.IGNORECASE)


def stated_answer(text: str) -> str | None:
    """Return the last boxed answer, or the line that follows the last "Answer:", whichever is later."""
    line = max(_ANSWER_LINE.finditer(text), key=re.Match.start, default=None)
    start, content = last_box(text)
    if line is None or start > line.start():
        return content
    return line[1].strip().strip("*$").strip() or None


def has_one_thought(text: str) -> bool:
    """True if there is exactly one `<think>`, closed once after it."""
    once = text.count("<think>") == text.count("</think>") == 1
    return once and text.index("<think>") < text.index("</think>")


@REWARD_FNS.register("math_boxed_reward")
def math_boxed_reward(
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    with_think: bool = False,
    format_score_coef: float = 0.1,
    **_: Any,
) -> Parts:
    """`accuracy` 1 if the last boxed answer equals the reference, else 0.

    With `with_think`, `format` is minus `format_score_coef` for a response without exactly one `<think>…</think>`.
    """
    answer, gold = last_box(response)[1], reference(truth)
    return _with_format(answer is not None and same(answer, gold, prompt), response, with_think, format_score_coef)


def boxed_fast(
    *, response: str, truth: Any, with_think: bool = False, format_score_coef: float = 0.1, **_: Any
) -> Parts | None:
    """Return `math_boxed_reward`'s verdict if it needs no verifier: no boxed answer, or two plain numbers."""
    right = plain_verdict(last_box(response)[1], reference(truth))
    return None if right is None else _with_format(right, response, with_think, format_score_coef)


def _with_format(right: bool, response: str, with_think: bool, coefficient: float) -> Parts:
    parts = {"accuracy": float(right)}
    if with_think:
        parts["format"] = 0.0 if has_one_thought(response) else -coefficient
    return parts


@REWARD_FNS.register("math_dapo_reward")
def math_dapo_reward(
    *,
    prompt: str,
    response: str,
    truth: Any,
    task: Mapping[str, Any],
    response_tokens: int | None = None,
    enable_overlong_penalty: bool = False,
    penalty_factor: float = 1.0,
    max_response_length: int | None = None,
    cache_length: int | None = None,
    wrong_score: float = 0.0,
    **_: Any,
) -> Parts:
    """`accuracy` 1 if the answer in a box or after the last "Answer:" equals the reference, else 0.

    A `wrong_score` is a separate part: that score for a wrong answer, 0 for a right one. With
    `enable_overlong_penalty`, `format` is DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13).
    """
    answer, gold = stated_answer(response), reference(truth)
    right = answer is not None and same(answer, gold, prompt)
    parts = {"accuracy": float(right)}
    if wrong_score:
        parts["wrong_score"] = 0.0 if right else wrong_score
    if enable_overlong_penalty:
        parts["format"] = _overlong(response_tokens, max_response_length, cache_length, penalty_factor)
    return parts


def _overlong(tokens: int | None, longest: int | None, cache: int | None, factor: float) -> float:
    """0 up to longest - cache tokens, then falling to -factor at longest. Raises DataError if a length is unknown."""
    if longest is None or cache is None or not 0 < cache <= longest:
        raise DataError(
            "enable_overlong_penalty needs max_response_length and cache_length, 0 < cache_length <= "
            f"max_response_length; they are {longest} and {cache}",
            key="cache_length",
        )
    if tokens is None:
        raise DataError(
            "math_dapo_reward cannot tell how long an answer is: the workflow gives no number of tokens "
            "(RewardItem.response_tokens); leave enable_overlong_penalty out",
            key="response_tokens",
        )
    return overlong_punishment(tokens, longest, cache, factor)


def overlong_punishment(tokens: int, longest: int, cache: int, factor: float) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13): 0 up to longest - cache tokens, then to -factor at longest."""
    return -factor * min(1.0, max(0.0, (tokens - (longest - cache)) / cache))


vars(math_boxed_reward)["reference_kind"] = vars(math_dapo_reward)["reference_kind"] = reference_kind
FAST_PATHS["math_boxed_reward"] = boxed_fast
WARM_UPS["math_boxed_reward"] = WARM_UPS["math_dapo_reward"] = WARM_UPS["math_reward"]
