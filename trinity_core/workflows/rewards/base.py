"""Reward functions: their signature, input and result."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from trinity_core.base.errors import TrinityError

Parts = dict[str, float]
ROUNDING = 1e-6
"""Tolerance for an accuracy outside 0 to 1, such as a mean of floats; it is clamped."""
VERIFIER_ERRORS = "verifier_errors"
"""The metric that is 1 for an experience that no verifier could judge; such experiences carry no loss."""
JUDGE_CALLS = "judge_calls"
"""The metric with an experience's share of the requests to judges."""


class RewardFn(Protocol):
    """Scores one answer. It runs in a worker process, which is killed if it takes too long.

    Returns the reward, or its named parts (their sum is the reward, each is a metric; see `scored`); it may be `async`.
    An exception counts as a failure of the verifier, never as a wrong answer.
    """

    def __call__(
        self, *, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **args: Any
    ) -> Parts | Scored | float:
        """`task` is the row; `args` are the task set's `reward_fn_args`.

        A function with a parameter `response_tokens` gets the number of tokens of the answer, or None.
        """


def graded(score: float) -> Parts:
    """Split a score from 0 to 1 into `accuracy`, 1 for a full score and else 0, and `partial`, the rest."""
    solved = score >= 1.0
    return {"accuracy": float(solved), "partial": score - solved}


@dataclass(frozen=True, slots=True)
class Scored:
    """A result of a reward function with further numbers for the metrics besides its parts."""

    parts: Parts
    counts: Parts


def scored(result: Any) -> Scored:
    """Convert what a reward function returned.

    A number is the part `reward`; a dict names the parts. Text in it is no part, and None is a part that does not
    apply. In a dict with `score`, veRL's form, only that is a part, and other numbers are metrics. Raises TypeError or
    ValueError for anything else, for NaN and infinity, and if there is no number at all.
    """
    if isinstance(result, Scored):
        return Scored(_numbers(result.parts), _numbers(result.counts))
    if not isinstance(result, Mapping):
        return Scored(_numbers({"reward": result}), {})
    numbers = _numbers({key: value for key, value in result.items() if value is not None and not _is_text(value)})
    if "score" in result:
        score = number_of(result["score"], "score")
        return Scored({"score": score}, {key: value for key, value in numbers.items() if key != "score"})
    if not numbers:
        raise ValueError(f"no number in {dict(result)!r:.80}")
    return Scored(numbers, {})


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


def _numbers(values: Mapping[Any, Any]) -> Parts:
    return {str(name): number_of(value, str(name)) for name, value in values.items()}


def number_of(value: Any, name: str) -> float:
    """Return a number, a boolean, or the one element of an array or tensor as a float. Raises TypeError or ValueError,
    with `name`, for anything else."""
    if not isinstance(value, Real) and hasattr(value, "item"):  # NumPy's or torch's
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r:.80}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    return float(value)


def completed(result: Any) -> Any:
    """Return the result of a function that may be `async`."""

    async def waited(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return asyncio.run(waited(result)) if inspect.isawaitable(result) else result


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name, that of the function inside a partial, or that of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


class FastPath(Protocol):
    """A verdict without a worker, or None. It must equal the verdict of the reward function."""

    def __call__(self, *, response: str, truth: Any, **args: Any) -> Parts | None: ...


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One answer to be scored. Picklable."""

    response: str
    truth: Any = None
    prompt: str = ""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The row."""
    args: Mapping[str, Any] = field(default_factory=dict)
    response_tokens: int | None = None
    """Tokens of the answer, if the workflow sets them."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The whole conversation before the answer, if the workflow sets it; for rewards that need models."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A score in named parts, or the error why there is none. Raises TrinityError unless exactly one is set.

    The part `accuracy` is from 0 to 1, because evaluations, pass rates and task selectors read it as the fraction of
    right answers; use another name for a penalty. Rounding errors (`ROUNDING`) are clamped; any other accuracy raises
    TrinityError.

    Pass it on unchanged, `completion.experience(reward=reward)`: an experience with an error has no reward and no loss.
    """

    parts: Parts | None = None
    """None if the verifier failed, so that no part can be mistaken for a 0."""
    error: str | None = None
    """Why the verifier gave no verdict: it timed out, died, raised or returned no finite number."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers for the metrics, which are not part of the reward."""

    def __post_init__(self) -> None:
        if (self.parts is None) == (self.error is None):
            raise TrinityError("a Reward has either parts or an error", key="error")
        for name, numbers in (("parts", self.parts), ("counts", self.counts)):
            if not numbers or "accuracy" not in numbers:
                continue
            accuracy = numbers["accuracy"]
            if not -ROUNDING <= accuracy <= 1 + ROUNDING:
                raise TrinityError(
                    f"the reward's part 'accuracy' is {accuracy!r}, but it is the share of right answers, from 0 to 1: "
                    "give a penalty or a bonus as a part of another name",
                    key="accuracy",
                )
            object.__setattr__(self, name, {**numbers, "accuracy": min(1.0, max(0.0, accuracy))})

    @property
    def value(self) -> float | None:
        """The sum of the parts; None if the verifier failed."""
        return None if self.parts is None else float(sum(self.parts.values()))

    @property
    def metrics(self) -> dict[str, float]:
        """Parts, counts and `verifier_errors`, which is 1 if the verifier failed; averages then skip the missing
        parts."""
        return {**self.counts, **(self.parts or {}), VERIFIER_ERRORS: float(self.error is not None)}


FAST_PATHS: dict[str, FastPath] = {}
WARM_UPS: dict[str, Callable[[], object]] = {}
"""Called once per worker before its first answer, so that imports and caches do not count towards a timeout."""
TIME_LIMITS: dict[str, Callable[[Mapping[str, Any]], float]] = {}
"""Seconds for a verdict, from `reward_fn_args`, for functions that may take longer than the pool's limit."""
