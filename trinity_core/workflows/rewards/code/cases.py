"""The unit tests of a row, in the forms in which data sets have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinity_core.errors import DataError


@dataclass(frozen=True)
class Program:
    """A whole program: what it reads from its standard input and must write to its standard output."""

    given: str
    expected: str


@dataclass(frozen=True)
class Tests:
    """The tests of one row: programs to run, or calls and Python tests of the answer's functions."""

    programs: tuple[Program, ...] = ()
    functions: tuple[dict[str, Any], ...] = ()
    """For `inside.run_tests`: `{"python": source}` or `{"call": name, "arguments": [...], "expected": ...}`, where
    `wrapped` also takes the only element of `expected`."""
    setup: str = ""
    """Python that runs before each of the Python tests."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.programs) + len(self.functions)


def tests_of(truth: Any, task: Mapping[str, Any], name: str = "") -> Tests:
    """The tests of a row. Raises DataError if they cannot be read or there are none.

    Known are: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls (APPS, TACO); a list of `{"input":
    ..., "output": ..., "testtype": "stdin" | "functional"}` (LiveCodeBench); a list of `assert` lines (MBPP); and
    Python text with asserts or a function `check`, which is called with `name` or the row's `entry_point` (HumanEval).
    """
    name = name or str(task.get("entry_point") or "")
    found = _read(_parsed(truth), name)
    if not found.count:
        raise DataError("the row has no unit tests; set format.response_key to their column")
    setup = "\n".join(str(task[key]) for key in ("test_setup_code", "test_imports") if isinstance(task.get(key), str))
    return Tests(found.programs, found.functions, setup)


def _parsed(truth: Any) -> Any:
    if not isinstance(truth, str):
        return truth
    try:
        return json.loads(truth)
    except ValueError:
        return truth


def _read(tests: Any, name: str) -> Tests:
    if isinstance(tests, Mapping):
        return _pairs(tests)
    if isinstance(tests, str):
        return _python([tests], name) if tests.strip() else Tests()
    if not isinstance(tests, Sequence):
        tests = list(tests) if hasattr(tests, "__iter__") else []
    if all(isinstance(one, str) for one in tests):
        return _python([one for one in tests if one.strip()], name)
    if all(isinstance(one, Mapping) and {"input", "output"} <= one.keys() for one in tests):
        return _cases(tests, name)
    raise DataError("code_reward cannot read the row's unit tests; docs/rewards.md lists the forms that it knows")


def _pairs(tests: Mapping[str, Any]) -> Tests:
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        raise DataError("code_reward needs as many 'outputs' as 'inputs' in the row's unit tests")
    if not name:
        return Tests(tuple(Program(_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True)))
    calls = (  # APPS and TACO often wrap a result in a list of one
        {"call": name, "arguments": list(a), "expected": b, "wrapped": True}
        for a, b in zip(inputs, outputs, strict=True)
    )
    return Tests(functions=tuple(calls))


def _cases(tests: Sequence[Mapping[str, Any]], name: str) -> Tests:
    programs, calls = [], []
    for one in tests:
        if one.get("testtype", "stdin") == "stdin":
            programs.append(Program(_text(one["input"]), _text(one["output"])))
            continue
        called = (one.get("metadata") or {}).get("func_name") or name
        if not called:
            raise DataError("code_reward needs the name of the function that functional tests call: entry_point")
        try:
            arguments = [json.loads(line) for line in str(one["input"]).splitlines() if line.strip()]
            expected = json.loads(str(one["output"]))
        except ValueError as error:
            raise DataError(f"a functional test of the row is no JSON: {error}") from error
        calls.append({"call": called, "arguments": arguments, "expected": expected})
    return Tests(tuple(programs), tuple(calls))


def _python(tests: Sequence[str], name: str) -> Tests:
    if any("def check(" in test for test in tests):
        if not name:
            raise DataError("code_reward needs the name of the function that 'check' is given: entry_point")
        tests = [f"{test}\ncheck({name})" if "def check(" in test else test for test in tests]
    return Tests(functions=tuple({"python": test} for test in tests))


def _text(value: Any) -> str:
    """Some data sets have a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
