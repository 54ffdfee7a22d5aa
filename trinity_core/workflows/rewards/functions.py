"""The registry of reward functions, and those in TRL's form: registered, or passed to `trinity_core.train`."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity_core.base.registry import Registry
from trinity_core.workflows.rewards.base import RewardFn, completed, name_of, number_of

ANSWER = ("prompt", "response", "truth", "task")
"""Parameters that each reward function without a model gets."""
INPUTS = (*ANSWER, "response_tokens", "items", "models")
"""Parameters of reward functions that are not configuration keys."""
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


def misfit(name: str, function: Callable[..., Any], inputs: Iterable[str], args: Iterable[str] | None = None) -> str:
    """Return why a reward function cannot be called with these inputs and its own arguments (None: not known); "" if
    it can."""
    names = (*inputs, *(args or ()))
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        bind = signature.bind_partial if args is None else signature.bind
        bind(**dict.fromkeys(inputs), **dict.fromkeys(args or ()))
    except (TypeError, ValueError) as error:  # ValueError: it is built in
        forms = "`def name(*, response, truth, **_)` or, as in TRL, `def name(completions, **columns)`"
        return (
            f"the reward function '{name}' cannot be called with {', '.join(names)}: {error}; "
            f"register a function (not a class) of the form {forms}"
        )
    return ""


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


def in_our_form(function: Callable[..., Any]) -> RewardFn:
    """Return a registered function; one in TRL's form, which takes `completions`, as a `RewardFn`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it is no function, or built in: validation says so
        return function
    if "completions" not in parameters or "response" in parameters:
        return function
    score = reward_of({name_of(function): function})
    vars(score).update(function=function)
    score.__module__ = function.__module__
    return score


REWARD_FNS: Registry[RewardFn] = Registry("reward function", inputs=INPUTS, adapt=in_our_form)


def register_functions(file: Path, name: str) -> None:
    """Register the functions pickled in `file` as the reward function `name`. The file belongs to the run, as its
    plugins do."""
    functions: Functions = pickle.loads(file.read_bytes())  # noqa: S301 - written by the process that started the run
    REWARD_FNS.register(name)(reward_of(functions))
