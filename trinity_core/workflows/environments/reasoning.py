"""reasoning-gym: its generators as one-turn environments and as rows of a task set, and their verifiers as a reward."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from trinity_core.base.errors import DataError
from trinity_core.workflows.environments.protocol import ENVIRONMENTS, Step, missing
from trinity_core.workflows.rewards.base import WARM_UPS, graded
from trinity_core.workflows.rewards.functions import REWARD_FNS
from trinity_core.workflows.rewards.math import tagged_answers

EVALUATED = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip
"""Generators whose verifiers evaluate an answer."""
FUNCTIONS = frozenset({
    "Abs", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "erf", "exp", "ln",
    "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh",
})  # fmt: skip
"""Functions allowed in a formula."""
DATA = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.BitXor, ast.Call,
)  # fmt: skip
LARGEST_EXPONENT = 100
"""Largest exponent of a number, including products of nested powers: `9**9**9` would never finish."""


def is_evaluable(answer: str) -> bool:
    """True if evaluating the answer runs only arithmetic and the functions of formulas, or fails."""
    try:
        tree = ast.parse(answer.strip().replace("!", ""), mode="eval")
        return "!" not in answer and all(map(_is_harmless, ast.walk(tree))) and _power(tree) <= LARGEST_EXPONENT
    except (SyntaxError, ValueError):
        return True
    except (RecursionError, MemoryError):
        return False


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case ast.Name(id=name):
            return "_" not in name
        case ast.BinOp(op=ast.Mult()):  # a list or a text times a number may take all memory
            return not any(
                isinstance(part, ast.List | ast.Tuple) or isinstance(getattr(part, "value", None), str | bytes)
                for part in ast.walk(node)
            )
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _exponent(exponent) is not None or any(isinstance(part, ast.Name) for part in ast.walk(exponent))
        case _:
            return isinstance(node, DATA) and not isinstance(node, ast.Call)


def _power(node: ast.AST) -> float:
    """Return the largest product of exponents on a path to a number."""
    exponent = _exponent(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) else None
    return max(1.0, exponent or 1.0) * max((_power(child) for child in ast.iter_child_nodes(node)), default=1.0)


def _exponent(node: ast.expr) -> float | None:
    """Return the size of an exponent that is a number or a fraction of two, with or without a sign; else None."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return abs(number)
        case ast.UnaryOp(operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=above, op=ast.Div(), right=below):
            sizes = _exponent(above), _exponent(below)
            return sizes[0] / sizes[1] if sizes[0] is not None and sizes[1] else None
        case _:
            return None


HEADING = re.compile(r"####(.*)")
Score = Callable[[str, Mapping[str, Any]], float]


@ENVIRONMENTS.register("reasoning_gym")
class ReasoningGym:
    """One question of a generator, drawn with the seed; the reward is its verifier's score of the answer."""

    package: ClassVar[str] = "reasoning_gym"
    own_process: ClassVar[bool] = True
    """A verifier may never finish, for example on the derivative of a sum of functions to the 99th power."""

    def __init__(self, dataset: str, config: dict[str, Any] | None = None) -> None:
        """`dataset`: the generator's name. `config`: its settings except `seed` and `size`."""
        imported("reasoning_gym")  # takes seconds; making an environment has more time than a reset
        self._dataset, self._config = dataset, config or {}
        self._entry: dict[str, Any] = {}
        self._score: Score | None = None

    def reset(self, seed: int) -> Step:
        questions = generator(self._dataset, seed, 1, self._config)
        self._entry, self._score = questions[0], guarded(self._dataset, questions.score_answer)
        return Step(self._entry["question"])

    def step(self, action: str) -> Step:
        assert self._score is not None, "reset comes first"
        return Step("", float(self._score(answer_in(action), self._entry)), True)

    def tools(self) -> list[Any]:
        """Return no tools."""
        return []

    def close(self) -> None:
        """Does nothing."""


def imported(name: str) -> Any:
    """Import reasoning-gym. Raises InputError, for the environment or reward of this name, if it is not installed."""
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise missing(name, "reasoning_gym") from None
    return reasoning_gym


def generator(dataset: str, seed: int, size: int, config: Mapping[str, Any]) -> Any:
    """Return a reasoning-gym generator with `size` questions. Raises DataError if it refuses name or settings."""
    try:
        return imported("reasoning_gym").create_dataset(dataset, seed=seed, size=size, **config)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym's generator '{dataset}': {error}", key=dataset) from error


def rows(dataset: str, seed: int, size: int, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `size` rows of a task set: `prompt`, `answer`, and `entry`, JSON for the verifier.

    Raises DataError if the verifier judges differently after a round trip of its entry through JSON, like `arc_agi`'s.
    """
    questions, score = generator(dataset, seed, size, config), verifier(dataset)
    for entry in questions:
        text = json.dumps({"dataset": dataset, **entry}, default=str)
        answer = str(entry["answer"])
        if score(answer, json.loads(text)) != questions.score_answer(answer, entry):
            raise DataError(
                f"the verifier of '{dataset}' does not work on rows of a file; use env_workflow with the environment "
                "reasoning_gym instead",
                key=dataset,
            )
        yield {"prompt": entry["question"], "answer": answer, "entry": text}


def answer_in(text: str) -> str:
    """Return the answer in a response: in `<answer>`, after `####`, or all of it."""
    for _, answer in tagged_answers(text):
        return answer
    headings = HEADING.findall(text)
    return str(headings[-1] if headings else text).strip()


@REWARD_FNS.register("reasoning_gym_reward")
def reasoning_gym_reward(
    *, prompt: str, response: str, truth: Any, task: Mapping[str, Any], **_: Any
) -> dict[str, float]:
    """The verifier's score, from 0 to 1, as the parts of `graded`; for rows from `rows`.

    Raises DataError for other rows.
    """
    try:
        entry = json.loads(task["entry"])
        score = verifier(entry["dataset"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"reasoning_gym_reward reads the column 'entry', as configs/environment_tasks.py writes it: {error}",
            key="entry",
        ) from error
    return graded(float(score(answer_in(response), entry)))


def verifier(dataset: str) -> Score:
    return guarded(dataset, imported("reasoning_gym_reward").get_score_answer_fn(dataset))


def guarded(dataset: str, score: Score) -> Score:
    """Wrap `score` to return 0 for an answer that the verifier would run as a program."""
    if dataset not in EVALUATED:
        return score
    return lambda answer, entry: score(answer, entry) if is_evaluable(answer) else 0.0


def _import() -> None:
    verifier("chain_sum")


WARM_UPS["reasoning_gym_reward"] = _import
