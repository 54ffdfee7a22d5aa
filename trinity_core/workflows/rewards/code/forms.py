"""The forms in which data sets carry unit tests, read into `Tests`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trinity_core.base.errors import DataError
from trinity_core.workflows.rewards.code.checks import (
    DEFINITIONS,
    FUNCTIONS,
    NothingChecked,
    checks_something,
    entry_of,
    needs_earlier,
    prepared,
)


@dataclass(frozen=True)
class Program:
    """A whole program: its standard input and expected standard output."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class Tests:
    """The tests of one row: programs to run, or calls and Python tests of the answer's functions."""

    programs: tuple[Program, ...] = ()
    functions: tuple[dict[str, Any], ...] = ()
    """For `tests_side.run_tests`: what `prepared` returns, or `{"call": name, "arguments": [...], "named": {...},
    "expected": ...}`; with `wrapped`, the only element of `expected` is accepted too. `classes`: those of `given`."""
    given: str = ""
    """Definitions of the row's prompt, which the answer and its tests can use."""

    @property
    def count(self) -> int:
        return len(self.programs) + len(self.functions)


PYTHON_KINDS = ("functional", "function_call", "call_based")
PROGRAM_KINDS = ("stdin", "stdin_stdout", "stdio")
NAMES = ("fn_name", "func_name", "entry_point")
NESTED = ("test_cases", "tests", "unit_tests", "functional", "pytest", "assert_case")
"""Keys under which an object holds its tests."""
FORMS = "docs/rewards.md lists the supported forms"
_BEGINNING = re.compile(r"^(?:async def|def|class) ", re.MULTILINE)


def tests_of(truth: Any, task: Mapping[str, Any], name: str = "") -> Tests:
    """Return the tests of a row. Raises DataError if they cannot be read, or check nothing; `Unjudged` for tests in
    Python that are not valid.

    Supported forms, also as JSON or as Python writes them: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for
    calls (APPS, TACO, LiveCodeBench) or in the singular (CodeContests); a list of `{"input", "output"}` with
    `testtype` or `type` (LiveCodeBench, SYNTHETIC-1); a list of Python tests (MBPP); and Python text: `assert`, test
    functions and classes as of pytest and unittest (KodCode, BigCodeBench), or a function `check`, which is called with
    `name`, the row's `entry_point`, or the function that its `metadata` names (HumanEval). Answer and tests can use
    what a `prompt` in Python defines for such a function.
    """
    metadata = _parsed(task.get("metadata"))
    name = name or _function_name(task) or (_function_name(metadata) if isinstance(metadata, Mapping) else "")
    given = _definitions(task.get("prompt"), entry_of(name)) if name else []
    setup = [line for key in ("test_setup_code", "test_imports") for line in _lines(task.get(key))]
    tests = _read(_parsed(truth), name, "\n".join([*map(ast.unparse, given), *setup]))
    if not tests.count:
        raise DataError("the row has no unit tests; set format.response_key to their column")
    if all(not program.expected.strip() for program in tests.programs) and all(
        test.get("expected", "") is None for test in tests.functions
    ):
        raise NothingChecked("the row's tests for code_reward expect no output at all, so they check nothing")
    classes = [node.name for node in given if isinstance(node, ast.ClassDef)]
    functions = tuple(test | {"classes": classes} for test in tests.functions)
    return replace(tests, functions=functions, given="\n".join(map(ast.unparse, given)))


def _definitions(prompt: Any, entry: str) -> list[ast.stmt]:
    """Return what a prompt defines if it is Python, except `entry` and other functions that are still to be written."""
    begun = [match.start() for match in _BEGINNING.finditer(prompt)] if isinstance(prompt, str) else []
    for text in (prompt, prompt[: begun[-1]]) if begun else ():
        try:
            statements = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return [
            node
            for node in statements
            if isinstance(node, DEFINITIONS)
            and getattr(node, "name", "") != entry
            and not any(isinstance(part, FUNCTIONS) and _is_unwritten(part) for part in ast.walk(node))
        ]
    return []


def _is_unwritten(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if nothing but a docstring, `...`, `pass` or `raise` is in a function."""
    return all(
        isinstance(node, ast.Pass | ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def _parsed(value: Any) -> Any:
    """Parse JSON, including JSON that was encoded twice, and lists and dicts as Python writes them."""
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _literal(value)
    return value


def _literal(text: str) -> Any:
    if text.lstrip()[:1] in ("[", "{", "("):
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    return text


def _lines(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*map(str, value)] if isinstance(value, Sequence) else []


def _function_name(source: Mapping[str, Any]) -> str:
    return next((str(source[key]) for key in NAMES if source.get(key)), "")


def _read(tests: Any, name: str, setup: str) -> Tests:
    if isinstance(tests, Mapping):
        return _object(tests, name, setup)
    if isinstance(tests, str):
        return _python([tests], name, setup)
    if not isinstance(tests, Sequence):
        tests = list(tests) if hasattr(tests, "__iter__") else []
    if all(isinstance(item, str) for item in tests):
        return _python(tests, name, setup)
    if all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in tests):
        return _cases(tests, name)
    raise DataError(f"code_reward cannot read the row's unit tests; {FORMS}")


def _object(tests: Mapping[str, Any], name: str, setup: str) -> Tests:
    language = str(tests.get("language") or "python").lower()
    if not language.startswith("py"):
        raise DataError(f"code_reward runs Python, and the row's tests are for {language}")
    for key in NESTED:
        if tests.get(key) is not None:
            inner, called = _parsed(tests[key]), _function_name(tests)
            if isinstance(inner, Mapping) and called:
                inner = {"fn_name": called, **inner}
            return _read(inner, called or name, setup)
    inputs, outputs = (tests.get(f"{key}s", tests.get(key)) for key in ("input", "output"))
    if inputs is None or outputs is None:
        raise DataError(f"code_reward needs 'inputs' and 'outputs' in the row's unit tests; {FORMS}")
    if isinstance(inputs, str) or isinstance(outputs, str):
        return _cases([{**tests, "input": inputs, "output": outputs}], name)
    if len(inputs) != len(outputs):
        raise DataError("code_reward needs as many 'outputs' as 'inputs' in the row's unit tests")
    called = _function_name(tests)
    pairs = [*zip(inputs, outputs, strict=True)]
    if called:
        return Tests(functions=tuple(_called(called, *pair) for pair in pairs))
    return Tests(tuple(_program(*pair) for pair in pairs))


def _cases(tests: Sequence[Mapping[str, Any]], name: str) -> Tests:
    programs, calls = [], []
    for case in tests:
        is_call = case.get("fn_name") or (name and _named(case["input"]))
        kind = case.get("testtype") or case.get("type") or ("functional" if is_call else "stdin")
        if kind in PROGRAM_KINDS:
            programs.append(_program(case["input"], case["output"]))
            continue
        if kind not in PYTHON_KINDS:
            raise DataError(f"code_reward does not know tests of the type {kind!r}; {FORMS}")
        metadata = _parsed(case.get("metadata"))
        called = _function_name(case) or (_function_name(metadata) if isinstance(metadata, Mapping) else "") or name
        if not called:
            raise DataError("code_reward needs the name of the function that functional tests call: entry_point")
        calls.append(_called(called, case["input"], case["output"]))
    return Tests(tuple(programs), tuple(calls))


def _called(name: str, inputs: Any, expected: Any) -> dict[str, Any]:
    """Return a call. Arguments are a list, a dict, or text with one JSON value a line, as its result then is, or
    `a = 1, b = 2`, as of LeetCode."""
    call = {"call": name.removeprefix("Solution()."), "arguments": [], "named": {}, "expected": expected}
    if isinstance(inputs, Mapping):
        return call | {"named": dict(inputs), "wrapped": True}
    if isinstance(inputs, str):
        if arguments := _named(inputs):
            return call | {"named": arguments, "expected": _parsed(expected), "wrapped": False}
        try:
            call["arguments"] = [json.loads(line) for line in inputs.splitlines() if line.strip()]
            call["expected"] = json.loads(expected) if isinstance(expected, str) else expected
        except ValueError as error:
            raise DataError(f"a functional test of the row is not JSON: {error}: {inputs[:80]!r}") from error
        return call | {"wrapped": not isinstance(expected, str)}
    if not isinstance(inputs, Sequence) and not hasattr(inputs, "tolist"):
        raise DataError(f"a functional test of the row has {type(inputs).__name__} in place of a list of arguments")
    return call | {"arguments": list(inputs), "wrapped": True}  # APPS and TACO often wrap a result in a list of one


def _named(text: Any) -> dict[str, Any]:
    """Read `a = 1, b = [2]`; {} for anything else."""
    try:
        match ast.parse(f"f({text})", mode="eval").body:
            case ast.Call(args=[], keywords=keywords):
                return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    return {}


def _python(tests: Sequence[str], name: str, setup: str) -> Tests:
    """Return Python tests. Entries that check nothing, such as imports, run before each of those behind them; entries
    that use each other's names are one test."""
    if len(tests) > 1 and needs_earlier(tests):
        tests = ["\n".join(tests)]
    made: list[dict[str, Any]] = []
    begin = [setup] if setup else []
    for test in tests:
        if test.strip().startswith("eJ") and not test.split()[1:]:
            raise DataError(
                "the row's tests are packed (zlib and pickle), as LiveCodeBench's private_test_cases, which are never "
                "unpickled: use public_test_cases, or convert them to JSON"
            )
        if len(tests) > 1 and not checks_something(test):
            begin.append(test)
        elif test.strip():
            made.append(prepared("\n".join([*begin, test]), name))
    if not made and any(test.strip() for test in tests):
        prepared("\n".join([*begin, *tests]), name)  # raises
    return Tests(functions=tuple(made))


def _program(stdin: Any, expected: Any) -> Program:
    if stdin is None or expected is None:
        raise DataError("a test of the row has null in place of its input or output")
    return Program(_text(stdin), _text(expected))


def _text(value: Any) -> str:
    """Join a list of lines, which some data sets have."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
