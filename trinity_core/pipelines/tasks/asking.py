"""Operators that ask a language model to judge rows, to solve tasks, or to rewrite them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

from annotated_types import Ge, Gt, Le

from trinity_core.base.errors import DataError, InputError
from trinity_core.data.files import Row
from trinity_core.pipelines.tasks.models import AskedModel, NoAnswer, Question, TaskModels, asked_model
from trinity_core.pipelines.tasks.task_operator import (
    TASK_OPERATORS,
    Memory,
    Outcome,
    TaskOperator,
    Unusable,
    checked_keys,
    plugin_file,
    text_of,
)
from trinity_core.workflows import REWARD_FNS
from trinity_core.workflows.rewards.base import Reward, RewardItem
from trinity_core.workflows.rewards.judge import last_object
from trinity_core.workflows.rewards.models import MODEL_REWARDS
from trinity_core.workflows.rewards.pool import RewardPool

LOWEST, HIGHEST = 1, 5
Share = Annotated[float, Ge(0), Le(1)]
CONCLUDE = (
    f"Give each aspect a whole number from {LOWEST} to {HIGHEST}. You may explain first. Conclude with JSON on a line "
    "of its own, with a number for each aspect, such as "
)
COLUMN = "pass_rate"
REWRITE = (
    "You rewrite a task for a language model. Keep every number and everything that its answer depends on, so that the "
    "answer stays the same; change the wording, the names and the story. Reply with the rewritten task alone."
)


class AskingOperator(TaskOperator):
    """Base of operators that ask one model."""

    def __init__(self, models: TaskModels | None, asked: AskedModel) -> None:
        self._models, self._asked = models, asked

    @property
    def asks(self) -> Sequence[AskedModel]:
        return [self._asked]

    def ask(self, questions: Sequence[Question]) -> list[str | NoAnswer]:
        """Return the model's answers, in the order of the questions."""
        assert self._models is not None, "curate gives the models"
        return self._models.ask(self._asked, questions)


class JudgedFilter(AskingOperator):
    """Keep rows whose score is between `min_score` and `max_score`, and write it to the column `column`.

    The score is the mean of the aspects divided by the highest rating: 0.2 to 1. A row without a readable verdict is
    rejected, never scored 0.
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
        min_score: Share = 0.5,
        max_score: Share = 1.0,
        base_url: str | None = None,
        api_key_env: str | None = None,
        temperature: Annotated[float, Ge(0)] = 0.0,
        max_tokens: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        name = f"llm_{self.column.removeprefix('llm_')}_filter"
        super().__init__(models, asked_model(name, api_or_hf_model, base_url, api_key_env))
        self._keys = checked_keys(name, input_keys)
        self._fields = tuple(field_names or self._keys)
        if len(self._fields) != len(self._keys):
            raise InputError(
                f"{name}: field_names must have a name for each of the {len(self._keys)} input_keys", key="field_names"
            )
        if max_score < min_score:
            raise InputError(f"{name}: max_score {max_score:g} is below min_score {min_score:g}", key="max_score")
        self._bounds, self._temperature, self._max_tokens = (min_score, max_score), temperature, max_tokens

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        answers = self.ask([self._question(row) for row in rows])
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
    """Return the mean of the aspects in the last JSON object that has them, divided by 5; None without such an
    object."""
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
    """Keep tasks of a certain difficulty as rated by a language model: `llm_difficulty_score`, from 0.2 (easy) to 1."""

    column = "llm_difficulty_score"
    aspects = ("reasoning", "knowledge", "steps", "ambiguity")
    task = (
        "You rate how difficult a task is for a capable language model: how much reasoning it takes, how much "
        "knowledge, how many steps, and how ambiguous it is. "
    )


@TASK_OPERATORS.register("llm_quality_score_filter")
class LlmQualityScoreFilter(JudgedFilter):
    """Keep tasks of a certain quality as rated by a language model: `llm_quality_score`, from 0.2 (poor) to 1."""

    column = "llm_quality_score"
    aspects = ("correctness", "clarity", "completeness", "usefulness")
    task = (
        "You rate the quality of an example that a language model is to learn from: whether it is correct, clear, "
        "complete, and useful to learn from. "
    )


class Solving(AskingOperator):
    """Base of operators that ask a model to solve tasks, and a reward function which answers are correct."""

    def __init__(
        self, name: str, models: TaskModels | None, asked: AskedModel, keys: tuple[str, str],
        reward: tuple[str, Mapping[str, Any], float], system_prompt: str, temperature: float, max_tokens: int | None,
        plugin_dir: str | None,
    ) -> None:  # fmt: skip
        """`keys`: columns of task and reference answer. `reward`: function, arguments, and the minimum reward of a
        correct answer."""
        super().__init__(models, asked)
        self._keys = keys
        self._reward_fn, self._reward_args, self._right = reward
        self._system, self._temperature, self._max_tokens = system_prompt, temperature, max_tokens
        self._pool = RewardPool(plugin_dir=plugin_dir)
        REWARD_FNS.resolve(self._reward_fn)
        if self._reward_fn in MODEL_REWARDS:
            raise InputError(
                f"{name}: {self._reward_fn} asks a model itself; choose a reward function that does not",
                key="reward_fn",
            )

    @property
    def files(self) -> Sequence[Path]:
        source = plugin_file(REWARD_FNS.resolve(self._reward_fn))
        return (source,) if source else ()

    def close(self) -> None:
        self._pool.close()

    def rates(self, tasks: Sequence[tuple[str, Row]], samples: int) -> list[float | Unusable]:
        """Return the share of correct answers to each task, among those that could be judged. A task is a prompt and
        its row."""
        asked = [
            Question(self._system, prompt, self._temperature, self._max_tokens, seed)
            for prompt, _ in tasks
            for seed in range(samples)
        ]
        answers = self.ask(asked)
        by_task = _shares(answers, samples)
        items = [
            [
                RewardItem(answer, row.get(self._keys[1]), prompt, row, self._reward_args)
                for answer in sampled
                if not isinstance(answer, NoAnswer)
            ]
            for (prompt, row), sampled in zip(tasks, by_task, strict=True)
        ]
        rates: list[float | Unusable] = []
        for sampled, rewards in zip(by_task, self._scored(items), strict=True):
            if isinstance(rewards, Unusable):
                rates.append(rewards)
                continue
            judged = [sum(reward.parts.values()) >= self._right for reward in rewards if reward.parts is not None]
            errors = [reward.error for reward in rewards if reward.error] + [
                answer.why for answer in sampled if isinstance(answer, NoAnswer)
            ]
            rates.append(sum(judged) / len(judged) if judged else Unusable(f"no answer could be judged: {errors[0]}"))
        return rates

    def _scored(self, items: Sequence[Sequence[RewardItem]]) -> list[list[Reward] | Unusable]:
        """Return the rewards of each task's answers; a reference that cannot be read makes only its task unusable."""
        try:
            rewards = iter(self._pool.score_sync(self._reward_fn, [item for answers in items for item in answers]))
            return [[next(rewards) for _ in answers] for answers in items]
        except DataError as error:
            if len(items) == 1:
                return [Unusable(str(error))]
            return [rewards for answers in items for rewards in self._scored([answers])]


def _shares(answers: Sequence[str | NoAnswer], size: int) -> list[Sequence[str | NoAnswer]]:
    return [answers[start : start + size] for start in range(0, len(answers), size)]


@TASK_OPERATORS.register("pass_rate_filter")
class PassRateFilter(Solving):
    """Keep tasks whose pass rate is between `min_rate` and `max_rate`, and write it to the column `pass_rate`.

    The defaults keep tasks that the model always or never solves; 0.1 to 0.9 leaves those from which groups of rollouts
    learn. An answer is correct from the reward `right` on. Answers that cannot be judged do not count.
    """

    def __init__(
        self,
        models: TaskModels | None,
        api_or_hf_model: str,
        prompt_key: str = "question",
        response_key: str = "answer",
        reward_fn: str = "math_reward",
        reward_fn_args: dict[str, Any] | None = None,
        right: float = 1.0,
        samples: Annotated[int, Ge(1)] = 8,
        min_rate: Share = 0.0,
        max_rate: Share = 1.0,
        system_prompt: str = "",
        base_url: str | None = None,
        api_key_env: str | None = None,
        temperature: Annotated[float, Ge(0)] = 1.0,
        max_tokens: Annotated[int, Ge(1)] | None = None,
        plugin_dir: str | None = None,
    ) -> None:
        name = "pass_rate_filter"
        asked = asked_model(name, api_or_hf_model, base_url, api_key_env)
        reward = (reward_fn, reward_fn_args or {}, right)
        super().__init__(
            name, models, asked, (prompt_key, response_key), reward, system_prompt, temperature, max_tokens, plugin_dir
        )
        if max_rate < min_rate:
            raise InputError(f"{name}: max_rate {max_rate:g} is below min_rate {min_rate:g}", key="max_rate")
        self._samples, self._bounds = samples, (min_rate, max_rate)

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        rates = self.rates([(text_of(row, self._keys[0]), row) for row in rows], self._samples)
        lowest, highest = self._bounds
        return [
            rate if isinstance(rate, Unusable) else [{**row, COLUMN: rate}] if lowest <= rate <= highest else []
            for row, rate in zip(rows, rates, strict=True)
        ]


@TASK_OPERATORS.register("rewrite_mapper")
class RewriteMapper(Solving):
    """Add `rewrites` of each task in other words, with its reference answer, written by a language model.

    A rewrite is kept only if the model, asked `checks` times, reaches the reference answer at least at the rate
    `min_agreement`: a rewrite with another answer would teach errors. The column `rewritten` marks them.
    """

    def __init__(
        self,
        models: TaskModels | None,
        api_or_hf_model: str,
        prompt_key: str = "question",
        response_key: str = "answer",
        rewrites: Annotated[int, Ge(1)] = 1,
        checks: Annotated[int, Ge(1)] = 4,
        min_agreement: Annotated[float, Gt(0), Le(1)] = 0.75,
        reward_fn: str = "math_reward",
        reward_fn_args: dict[str, Any] | None = None,
        right: float = 1.0,
        system_prompt: str = "",
        base_url: str | None = None,
        api_key_env: str | None = None,
        temperature: Annotated[float, Ge(0)] = 1.0,
        max_tokens: Annotated[int, Ge(1)] | None = None,
        plugin_dir: str | None = None,
    ) -> None:
        name = "rewrite_mapper"
        asked = asked_model(name, api_or_hf_model, base_url, api_key_env)
        reward = (reward_fn, reward_fn_args or {}, right)
        super().__init__(
            name, models, asked, (prompt_key, response_key), reward, system_prompt, temperature, max_tokens, plugin_dir
        )
        self._rewrites, self._checks, self._agreement = rewrites, checks, min_agreement

    def rows(self, rows: Sequence[Row], memory: Memory) -> list[Outcome]:
        key = self._keys[0]
        asked = [
            Question(REWRITE, text_of(row, key), self._temperature, self._max_tokens, seed)
            for row in rows
            for seed in range(self._rewrites)
        ]
        rewrites = _shares(self.ask(asked), self._rewrites)
        rewritten = [
            (index, text.strip())
            for index, (row, texts) in enumerate(zip(rows, rewrites, strict=True))
            for text in dict.fromkeys(text for text in texts if isinstance(text, str))
            if text.strip() and text.strip() != text_of(row, key).strip()
        ]
        rates = self.rates([(text, rows[index]) for index, text in rewritten], self._checks)
        outcomes: list[list[Row]] = [[{**row, "rewritten": False}] for row in rows]
        for (index, text), rate in zip(rewritten, rates, strict=True):
            if not isinstance(rate, Unusable) and rate >= self._agreement:
                outcomes[index].append({**rows[index], key: text, "rewritten": True})
        return list(outcomes)
