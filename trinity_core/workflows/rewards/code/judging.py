"""Runs unit tests on an answer's program; verdicts are made where the answer cannot write."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.errors import DataError
from trinity_core.waits import is_readable
from trinity_core.workflows.rewards.code import sandbox_rpc
from trinity_core.workflows.rewards.code.sandbox import (
    LOOK_SECONDS,
    START_SECONDS,
    CodeLimits,
    Sandbox,
    SandboxFailed,
    python,
    run_program,
)
from trinity_core.workflows.rewards.code.sandbox_rpc import Unjudged


@dataclass(frozen=True)
class Program:
    """A whole program: its standard input and expected standard output."""

    given: str
    expected: str


@dataclass(frozen=True)
class Tests:
    """The tests of one row: programs to run, or calls and Python tests of the answer's functions."""

    programs: tuple[Program, ...] = ()
    functions: tuple[dict[str, Any], ...] = ()
    """For `sandbox_rpc.run_tests`: `{"python": source}` or `{"call": name, "arguments": [...], "expected": ...}`; with
    `wrapped`, the only element of `expected` is accepted too."""
    setup: str = ""
    """Python code that runs before each of the Python tests."""

    @property
    def count(self) -> int:
        return len(self.programs) + len(self.functions)


def tests_of(truth: Any, task: Mapping[str, Any], name: str = "") -> Tests:
    """Return the tests of a row. Raises DataError if they cannot be read or there are none.

    Supported forms: `{"inputs": [...], "outputs": [...]}`, with `fn_name` for calls (APPS, TACO); a list of `{"input":
    ..., "output": ..., "testtype": "stdin" | "functional"}` (LiveCodeBench); a list of `assert` lines (MBPP); and
    Python text with asserts or a function `check`, which is called with `name` or the row's `entry_point` (HumanEval).
    """
    name = name or str(task.get("entry_point") or "")
    tests = _read(_parsed(truth), name)
    if not tests.count:
        raise DataError("the row has no unit tests; set format.response_key to their column")
    setup = "\n".join(str(task[key]) for key in ("test_setup_code", "test_imports") if isinstance(task.get(key), str))
    return Tests(tests.programs, tests.functions, setup)


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
    raise DataError("code_reward cannot read the row's unit tests; docs/rewards.md lists the supported forms")


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
            raise DataError(f"a functional test of the row is not JSON: {error}") from error
        calls.append({"call": called, "arguments": arguments, "expected": expected})
    return Tests(tuple(programs), tuple(calls))


def _python(tests: Sequence[str], name: str) -> Tests:
    if any("def check(" in test for test in tests):
        if not name:
            raise DataError("code_reward needs the name of the function that 'check' gets: entry_point")
        tests = [f"{test}\ncheck({name})" if "def check(" in test else test for test in tests]
    return Tests(functions=tuple({"python": test} for test in tests))


def _text(value: Any) -> str:
    """Join a list of lines, which some data sets have."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


RPC_SOURCE = Path(sandbox_rpc.__file__).read_text(encoding="utf-8")


@dataclass
class Outcomes:
    """Numbers of tests that passed, failed, and exceeded a limit."""

    passed: int = 0
    failed: int = 0
    exceeded: int = 0

    def add(self, passed: bool, exceeded: str = "") -> None:
        self.passed += passed
        self.failed += not passed
        self.exceeded += bool(exceeded)


@dataclass
class Judging:
    """Runs the tests of one answer for at most `total_seconds`; after the first failure only if all are `wanted`.

    Tests not reached in that time count as failed if one did; otherwise there is no verdict.
    """

    code: str
    limits: CodeLimits
    wanted: bool
    total_seconds: float

    def run(self, tests: Tests) -> Outcomes:
        """Run the tests; return their outcomes. Raises `SandboxFailed`, `Unjudged` or TimeoutError if there is no
        verdict."""
        self._ends = time.monotonic() + self.total_seconds
        counts = Outcomes()
        for program in tests.programs:
            if self._is_decided(counts):
                return counts
            ran = run_program({"solution.py": self.code}, python("solution.py"), program.given, self.limits)
            counts.add(not ran.exceeded and same_output(ran.output, program.expected), ran.exceeded)
        left = list(tests.functions)
        while left and not self._is_decided(counts):
            left = left[self._functions(left, tests.setup, counts) :]
        return counts

    def _is_decided(self, counts: Outcomes) -> bool:
        """True if no further test is needed. Raises TimeoutError if time is up and none has failed."""
        is_late = time.monotonic() > self._ends
        if is_late and not counts.failed:
            raise TimeoutError(f"the tests took longer than {self.total_seconds:g} s together (total_seconds)")
        return counts.failed > 0 and (is_late or not self.wanted)

    def _functions(self, tests: Sequence[dict[str, Any]], setup: str, counts: Outcomes) -> int:
        """Run tests until all are decided or one ends the answer's process; return the number decided."""
        with ExitStack() as stack:
            ours, theirs, judge, tested = (
                stack.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
            )
            answer = Sandbox(
                {"solution.py": self.code, "sandbox_rpc.py": RPC_SOURCE},
                python("sandbox_rpc.py", "answer", str(theirs.fileno())),
                self.limits,
                descriptors=[theirs.fileno()],
            )
            tester = Sandbox(
                {"sandbox_rpc.py": RPC_SOURCE},
                python("sandbox_rpc.py", "tests", str(ours.fileno()), str(tested.fileno())),
                replace(self.limits, seconds=2 * self.total_seconds + self.limits.seconds),
                descriptors=[ours.fileno(), tested.fileno()],
            )
            stack.enter_context(tester)  # first: it closes itself to others before the answer's code runs
            stack.enter_context(answer)
            for end in (ours, theirs, tested):
                end.close()
            judge.settimeout(START_SECONDS)
            with suppress(OSError):  # the tests' process has ended, which is handled below
                judge.sendall(json.dumps({"setup": setup, "tests": tests}).encode() + b"\n")
            return self._read(judge, answer, tester, len(tests), counts)

    def _read(self, judge: socket.socket, answer: Sandbox, tester: Sandbox, count: int, counts: Outcomes) -> int:
        """Read verdicts until all have arrived, one is enough, or no more will come."""
        text, done = b"", 0
        while done < count and not self._is_decided(counts):
            if is_readable(judge.fileno(), LOOK_SECONDS):
                try:
                    piece = judge.recv(1 << 16)
                except ConnectionResetError:  # it ended before it had read its tests
                    piece = b""
                if not piece:
                    return self._silent(tester, counts, done)
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    _count(json.loads(line), counts)
                    done += 1
                    answer.restart_clock()
            elif exceeded := answer.exceeded() or tester.exceeded():
                counts.add(False, exceeded)
                return done + 1
        return done

    def _silent(self, tester: Sandbox, counts: Outcomes, done: int) -> int:
        """Handle the end of the tests' process: after the answer's process it is a verdict, by itself it is an
        error."""
        try:
            status = tester.process.wait(LOOK_SECONDS * 100)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0 or not done:
            raise SandboxFailed(f"the process of the tests ended with status {status}, without a verdict")
        return done


def _count(verdict: dict[str, Any], counts: Outcomes) -> None:
    if "unjudged" in verdict:
        raise Unjudged(verdict["unjudged"])
    counts.add(verdict["passed"])


def same_output(output: bytes, expected: str) -> bool:
    """True if an output is the expected one: line by line the same words, numbers with a point to 1e-6."""
    lines, wanted = (_words(text) for text in (output.decode(errors="replace"), expected))
    return len(lines) == len(wanted) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(lines, wanted, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in expected:
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
