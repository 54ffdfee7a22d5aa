"""Filters by a language model's judgement of each row, with the names and arguments of Data-Juicer's operators."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeGuard

from annotated_types import Ge, Le

from trinity_core.data.files import Row
from trinity_core.errors import InputError
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question, TaskModels, asked_model
from trinity_core.pipelines.tasks.task_operator import (
    TASK_OPERATORS,
    Memory,
    Outcome,
    TaskOperator,
    Unusable,
    checked_keys,
    text_of,
)
from trinity_core.workflows.rewards.judge import last_object

LOWEST, HIGHEST = 1, 5
Score = Annotated[float, Ge(0), Le(1)]
CONCLUDE = (
    f"Give each aspect a whole number from {LOWEST} to {HIGHEST}. You may explain first. Conclude with JSON on a line "
    "of its own, with a number for each aspect, such as "
)


class JudgedFilter(TaskOperator):
    """Keep rows whose score lies from `min_score` to `max_score`, and write it to the column `column`.

    The score is the mean of the aspects, divided by the highest number: 0.2 to 1. A row on which the model gives no
    verdict that can be read is rejected, never scored 0.
    """

    column: ClassVar[str]
    task: ClassVar[str]
    """The system prompt."""
    aspects: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        models: TaskModels | None,
        api_or_hf_model: str,
        input_keys: list[str],
        field_names: list[str] | None = None,
        min_score: Score = 0.5,
        max_score: Score = 1.0,
        base_url: str | None = None,
        api_key_env: str | None = None,
        temperature: Annotated[float, Ge(0)] = 0.0,
        max_tokens: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        name = f"llm_{self.column.removeprefix('llm_')}_filter"
        self._models, self._asked = models, asked_model(name, api_or_hf_model, base_url, api_key_env)
        self._keys = checked_keys(name, input_keys)
        self._fields = tuple(field_names or self._keys)
        if len(self._fields) != len(self._keys):
            raise InputError(
                f"{name}: field_names must have a name for each of the {len(self._keys)} input_keys", key="field_names"
            )
        if max_score < min_score:
            raise InputError(f"{name}: max_score {max_score:g} is below min_score {min_score:g}", key="max_score")
        self._bounds, self._temperature, self._max_tokens = (min_score, max_score), temperature, max_tokens

    @property
    def asks(self) -> Sequence[AskedModel]:
        return [self._asked]

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        assert self._models is not None, "curate gives the models"
        answers = self._models.ask(self._asked, [self._question(row) for row in rows])
        return [self._outcome(row, answer) for row, answer in zip(rows, answers, strict=True)]

    def _question(self, row: Row) -> Question:
        shown = "\n\n".join(
            f"<{field}>\n{text_of(row, key)}\n</{field}>" for field, key in zip(self._fields, self._keys, strict=True)
        )
        example = "{" + ", ".join(f'"{aspect}": 3' for aspect in self.aspects) + "}."
        seed = int.from_bytes(hashlib.blake2b(shown.encode(errors="replace"), digest_size=4).digest(), "little") >> 1
        return Question(self.task + CONCLUDE + example, shown, self._temperature, self._max_tokens, seed)

    def _outcome(self, row: Row, answer: str | NoAnswer) -> Outcome:
        if isinstance(answer, NoAnswer):
            return Unusable(f"the model did not answer: {answer.why}")
        score = score_of(answer, self.aspects)
        if score is None:
            return Unusable(f"the model gave no verdict: {' '.join(answer.split())[-200:]!r}")
        lowest, highest = self._bounds
        return [{**row, self.column: score}] if lowest <= score <= highest else []


def score_of(answer: str, aspects: Sequence[str]) -> float | None:
    """The mean of the aspects in the last JSON object that has them, divided by 5; None without such an object."""
    verdict = last_object(answer, aspects[0])
    numbers = [verdict.get(aspect) for aspect in aspects] if verdict else []
    ratings = [number for number in numbers if _is_rating(number)]
    if not ratings or len(ratings) < len(aspects):
        return None
    return sum(ratings) / len(ratings) / HIGHEST


def _is_rating(number: Any) -> TypeGuard[float]:
    return type(number) in (int, float) and math.isfinite(number) and LOWEST <= number <= HIGHEST


@TASK_OPERATORS.register("llm_difficulty_score_filter")
class LlmDifficultyScoreFilter(JudgedFilter):
    """Keep tasks of a difficulty, as a language model sees it: `llm_difficulty_score`, from 0.2 (easy) to 1."""

    column = "llm_difficulty_score"
    aspects = ("reasoning", "knowledge", "steps", "ambiguity")
    task = (
        "You rate how difficult a task is for a capable language model: how much reasoning it takes, how much "
        "knowledge, how many steps, and how ambiguous it is. "
    )


@TASK_OPERATORS.register("llm_quality_score_filter")
class LlmQualityScoreFilter(JudgedFilter):
    """Keep tasks of a quality, as a language model sees it: `llm_quality_score`, from 0.2 (poor) to 1."""

    column = "llm_quality_score"
    aspects = ("correctness", "clarity", "completeness", "usefulness")
    task = (
        "You rate the quality of an example that a language model is to learn from: whether it is correct, clear, "
        "complete, and useful to learn from. "
    )
