"""`llm_judge`: a language model rates answers: each alone, in pairs, or all answers to one question together.

A judge that does not answer, or whose answer cannot be parsed, gives an error and never a number.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trinity_core.base.errors import DataError, TrinityError, Unanswered
from trinity_core.config.schema.explorer import ExternalModelConfig
from trinity_core.workflows.rewards.base import JUDGE_CALLS, Reward, RewardItem
from trinity_core.workflows.rewards.models import REQUESTS_AT_ONCE, RewardModels, conversation, model_reward

if TYPE_CHECKING:
    from trinity_core.data.formats import Message
    from trinity_core.workflows.rollout_model import RolloutModel

Mode = Literal["pointwise", "pairwise", "group"]
LOWEST, HIGHEST = 1, 10

POINTWISE = (
    f"You rate a response to a prompt on a scale from {LOWEST} to {HIGHEST}. Consider all criteria together; a "
    "response that fails important ones gets a low rating. You may explain first. Conclude with JSON on a line of its "
    'own, such as {"rating": 7}.'
)
PAIRWISE = (
    "You compare two responses to a prompt, A and B, by the criteria. You may explain first. Conclude with JSON on a "
    'line of its own: {"better": "A"}, {"better": "B"}, or {"better": "tie"}.'
)
GROUP = (
    "You compare several responses to one prompt by the criteria and give each a score from 0 to 1. You may explain "
    'first. Conclude with JSON on a line of its own, one score for each response in their order: {"scores": [0.2, 1]}.'
)
USUAL_CRITERIA = "Whether the response is correct, complete and to the point."
"""Rubric of rows without one."""
_OBJECT = re.compile(r"\{[^{}]*\}")


@model_reward("llm_judge")
async def llm_judge(
    *,
    items: Sequence[RewardItem],
    models: RewardModels,
    mode: Mode = "pointwise",
    rubric: str | Sequence[Any] | None = None,
    rubric_key: str = "rubric",
    with_reference: bool = False,
    model: str | None = None,
    base_url: str | None = None,
    model_name: str = "",
    api_key_env: str | None = None,
    requests_at_once: Annotated[int, Field(ge=1)] = REQUESTS_AT_ONCE,
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None,
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None,
    temperature: Annotated[float, Field(ge=0)] = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] | None = None,
    **_: Any,
) -> list[Reward]:
    """`judge`, from 0 to 1: a rating (`pointwise`), the fraction of wins (`pairwise`), or a score among others
    (`group`).

    The judge is the auxiliary model `model` (by default the first), or `model_name` at the endpoint `base_url` with the
    key in the variable `api_key_env`, with at most `requests_at_once` requests in flight, `requests_per_minute` and
    `tokens_per_minute`. `rubric` is a string or a list; by default the row's column
    `rubric_key`. With `with_reference` the judge sees the reference answer.
    """
    if base_url:
        settings = ExternalModelConfig(
            base_url=base_url, model_name=model_name, api_key_env=api_key_env, requests_at_once=requests_at_once,
            requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute,
        )  # fmt: skip
        judge_model = models.endpoint(settings)
    else:
        judge_model = models.judge(model)
    judge = _Judge(judge_model, {"temperature": temperature, "max_tokens": max_tokens})
    seen = [_question(item, rubric, rubric_key, with_reference) for item in items]
    answers = [item.response for item in items]
    if mode == "pointwise":
        return [_with_calls(reward, 1) for reward in await asyncio.gather(*map(judge.rating, seen, answers))]
    rewards: list[Reward | None] = [None] * len(items)
    compare = judge.wins if mode == "pairwise" else judge.scores
    for question in dict.fromkeys(seen):
        places = [index for index, other in enumerate(seen) if other == question]
        compared = await compare(question, [answers[index] for index in places])
        for index, reward in zip(places, compared, strict=True):
            calls = len(places) - 1 if mode == "pairwise" else int(index == places[0])
            rewards[index] = _with_calls(reward, calls)
    return [reward for reward in rewards if reward is not None]


def _with_calls(reward: Reward, calls: int) -> Reward:
    """Return the reward of an answer with its share of the judge's calls."""
    return replace(reward, counts={**reward.counts, JUDGE_CALLS: float(calls)})


class _Judge:
    def __init__(self, judge: RolloutModel, sampling: Mapping[str, Any]) -> None:
        self._judge, self._sampling = judge, sampling

    async def rating(self, question: str, answer: str) -> Reward:
        verdict = await self._ask(POINTWISE, f"{question}\n\n<response>\n{answer}\n</response>", "rating")
        if isinstance(verdict, Reward):
            return verdict
        rating = verdict["rating"]
        if not _is_number(rating) or not LOWEST <= rating <= HIGHEST:
            return Reward(error=f"the judge gave the rating {rating!r}, which is not from {LOWEST} to {HIGHEST}")
        return Reward({"judge": (rating - LOWEST) / (HIGHEST - LOWEST)})

    async def scores(self, question: str, answers: Sequence[str]) -> list[Reward]:
        """Score answers that the judge sees together."""
        shown = "\n\n".join(f'<response number="{i + 1}">\n{answer}\n</response>' for i, answer in enumerate(answers))
        verdict = await self._ask(GROUP, f"{question}\n\n{shown}", "scores")
        if isinstance(verdict, Reward):
            return [verdict] * len(answers)
        scores = verdict["scores"]
        fit = isinstance(scores, list) and len(scores) == len(answers)
        if not fit or not all(_is_number(score) and 0 <= score <= 1 for score in scores):
            error = f"the judge gave {scores!r} instead of {len(answers)} scores from 0 to 1"
            return [Reward(error=error)] * len(answers)
        return [Reward({"judge": float(score)}) for score in scores]

    async def wins(self, question: str, answers: Sequence[str]) -> list[Reward]:
        """Return the fraction of comparisons that each answer wins; each pair is shown in both orders."""
        pairs = list(itertools.permutations(range(len(answers)), 2))
        verdicts = await asyncio.gather(*(self._win(question, answers[a], answers[b]) for a, b in pairs))
        won: list[list[float]] = [[] for _ in answers]
        errors = [verdict for verdict in verdicts if isinstance(verdict, str)]
        for (a, b), verdict in zip(pairs, verdicts, strict=True):
            if not isinstance(verdict, str):
                won[a].append(verdict)
                won[b].append(1.0 - verdict)
        none = errors[0] if errors else "pairwise comparison needs two answers to the same question"
        return [Reward({"judge": sum(duels) / len(duels)}) if duels else Reward(error=none) for duels in won]

    async def _win(self, question: str, a: str, b: str) -> float | str:
        """Return 1 if A is better, 0 if B is, 0.5 for a tie; or the error."""
        shown = f"{question}\n\n<response_a>\n{a}\n</response_a>\n\n<response_b>\n{b}\n</response_b>"
        verdict = await self._ask(PAIRWISE, shown, "better")
        if isinstance(verdict, Reward):
            return str(verdict.error)
        share = {"a": 1.0, "b": 0.0, "tie": 0.5}.get(str(verdict["better"]).strip().lower())
        return f"the judge called {verdict['better']!r} better" if share is None else share

    async def _ask(self, system: str, text: str, key: str) -> dict[str, Any] | Reward:
        """Return the JSON with `key` that ends the judge's answer; a Reward with the error if there is none."""
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        seed = int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=4).digest(), "little") >> 1
        try:
            [answer] = await self._judge.chat(messages, seeds=[seed], **self._sampling)
        except (DataError, Unanswered) as error:
            return Reward(error=f"the judge did not answer: {error}")
        if answer.finish_reason != "stop":
            return Reward(error=f"the judge's answer is incomplete ({answer.finish_reason}); give it more max_tokens")
        verdict = last_object(answer.text, key)
        if verdict is None:
            return Reward(error=f"the judge gave no {key}: {' '.join(answer.text.split())[-200:]!r}")
        return verdict


def last_object(text: str, key: str) -> dict[str, Any] | None:
    for match in reversed(_OBJECT.findall(text)):
        try:
            value = json.loads(match)
        except (ValueError, RecursionError):
            continue
        if key in value:
            return dict(value)
    return None


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _question(item: RewardItem, rubric: str | Sequence[Any] | None, key: str, with_reference: bool) -> str:
    """Return what a judge sees of an item besides its answer."""
    shown = "\n\n".join(f"[{message['role']}] {message.get('content', '')}" for message in conversation(item))
    parts = [f"<prompt>\n{shown}\n</prompt>"]
    if with_reference and item.truth is None:
        raise DataError(
            "with_reference: the row has no reference answer; set format.response_key to its column",
            key="format.response_key",
        )
    if with_reference:
        parts.append(f"<reference_answer>\n{item.truth}\n</reference_answer>")
    criteria = rubric_text(item.task.get(key) if rubric is None else rubric)
    parts.append(f"<criteria>\n{criteria or USUAL_CRITERIA}\n</criteria>")
    return "\n\n".join(parts)


def rubric_text(rubric: Any) -> str:
    """Format a rubric: a string, an object with `description` and `weight`, or a list of strings and such objects.

    Raises TrinityError for anything else.
    """
    if rubric is None or isinstance(rubric, str):
        return rubric or ""
    rubric = [rubric] if isinstance(rubric, Mapping) else rubric
    lines = []
    for number, criterion in enumerate(rubric if isinstance(rubric, Sequence) else [rubric], 1):
        if isinstance(criterion, Mapping) and "description" in criterion:
            weight = f" (weight {criterion['weight']})" if "weight" in criterion else ""
            lines.append(f"{number}. {criterion['description']}{weight}")
        elif isinstance(criterion, str):
            lines.append(f"{number}. {criterion}")
        else:
            raise TrinityError(
                f"a rubric is a text, or a list of texts or of {{description, weight}}, not {criterion!r}", key="rubric"
            )
    return "\n".join(lines)
