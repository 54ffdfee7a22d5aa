"""Reward functions in TRL's form, passed by a script to `trinity_core.train`."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_core.workflows.rewards.base import REWARD_FNS, RewardFn, completed, number_of

PROMPT = "prompt"
NO_LIST = "must return a list with one number for each completion"
Functions = Mapping[str, Callable[..., Any]]
"""Name -> function(prompts, completions, **columns) that returns one number, or None, for each completion."""


@dataclass(frozen=True)
class Weighted:
    """A function whose value is multiplied by `weight`."""

    func: Callable[..., Any]
    weight: float

    def __call__(self, **inputs: Any) -> Any:
        return self.func(**inputs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.func)


def register_functions(file: Path, name: str) -> None:
    """Register the functions pickled in `file` as the reward function `name`. The file belongs to the run, as its
    plugins do."""
    functions: Functions = pickle.loads(file.read_bytes())  # noqa: S301 - written by the process that started the run
    REWARD_FNS.register(name)(reward_of(functions))


def reward_of(functions: Functions) -> RewardFn:
    """Return a reward function that sums several functions' values; each value is a part under the function's name.

    As in TRL, a function gets lists: here of one prompt and one completion, with the row's other columns by name. A
    completion is a string, or a list of one message if the row's prompt is a list of messages. None is not a part.
    """

    def score(*, prompt: str, response: str, task: Mapping[str, Any], **_: Any) -> dict[str, float]:
        question = task.get(PROMPT, prompt)
        completion = response if isinstance(question, str) else [{"role": "assistant", "content": response}]
        columns = {name: [value] for name, value in task.items() if name != PROMPT}
        inputs = {"prompts": [question], "completions": [completion], **columns}
        parts = {name: _value(name, function, inputs) for name, function in functions.items()}
        applicable = {name: value for name, value in parts.items() if value is not None}
        if not applicable:
            raise ValueError("every reward function returned None")
        return applicable

    return score


def accepted(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `names` that the function takes. Raises TypeError if it needs others."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name: names[parameter.name] for parameter in parameters if parameter.name in names}
    inspect.signature(function).bind(**names)
    return dict(names)


def _value(name: str, function: Callable[..., Any], inputs: Mapping[str, Any]) -> float | None:
    values = completed(function(**accepted(function, inputs)))
    if hasattr(values, "tolist"):  # NumPy's or torch's
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise ValueError(f"{name} {NO_LIST}, not {values!r}")
    if values[0] is None:
        return None
    return number_of(values[0], name) * (function.weight if isinstance(function, Weighted) else 1.0)
