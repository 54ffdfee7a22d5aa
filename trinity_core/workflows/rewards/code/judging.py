"""Runs unit tests on an answer's program; verdicts are made where the answer cannot write."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from trinity_core.base.waits import is_readable
from trinity_core.workflows.rewards.code.forms import Tests
from trinity_core.workflows.rewards.code.sandbox import (
    BUSY,
    LOOK_SECONDS,
    START_SECONDS,
    CodeLimits,
    Ran,
    Sandbox,
    SandboxFailed,
    python,
    run_program,
    run_remotely,
)
from trinity_core.workflows.rewards.code.sandbox_rpc import Unjudged

_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
"""A number; not `0101`, which may be a text."""
SCRIPT, ANSWER_SIDE, TESTS_SIDE, BOTH_SIDES = (
    {f"{name}.py": Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")}
    for name in ("sandbox_rpc", "answer_side", "tests_side", "both_sides")
)


@dataclass
class Outcomes:
    """Numbers of tests that passed, failed, and exceeded a limit."""

    passed: int = 0
    failed: int = 0
    exceeded: int = 0

    def add(self, passed: bool, exceeded: str | bool = "") -> None:
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
    endpoint: str = ""
    """URL of a `/run_code` that runs the code in place of a sandbox here."""

    def run(self, tests: Tests) -> Outcomes:
        """Run the tests; return their outcomes. Raises `SandboxFailed`, `Unjudged` or TimeoutError if there is no
        verdict."""
        self._ends = time.monotonic() + self.total_seconds
        self._files = {"prompt.py": tests.given, "solution.py": self.code}
        counts = Outcomes()
        for program in tests.programs:
            if self._is_decided(counts):
                return counts
            ran = self._program(program.stdin)
            counts.add(not ran.exceeded and same_output(ran.output, program.expected), ran.exceeded)
        left = list(tests.functions)
        if self.endpoint and left and not self._is_decided(counts):
            self._functions_remotely(left, counts)
            return counts
        while left and not self._is_decided(counts):
            left = left[self._functions(left, counts) :]
        return counts

    def _is_decided(self, counts: Outcomes) -> bool:
        """True if no further test is needed. Raises TimeoutError if time is up and none has failed."""
        is_late = time.monotonic() > self._ends
        if is_late and not counts.failed:
            raise TimeoutError(f"the tests took longer than {self.total_seconds:g} s together (total_seconds)")
        return counts.failed > 0 and (is_late or not self.wanted)

    def _program(self, stdin: str) -> Ran:
        if self.endpoint:
            return run_remotely(self.endpoint, self.code, {}, stdin, self.limits)
        return run_program({"solution.py": self.code}, python("solution.py"), stdin, self.limits)

    def _functions_remotely(self, tests: Sequence[dict[str, Any]], counts: Outcomes) -> None:
        """Run all tests of functions in one sandbox of the endpoint."""
        [driver] = BOTH_SIDES.values()
        ran = run_remotely(
            self.endpoint,
            driver,
            SCRIPT | ANSWER_SIDE | TESTS_SIDE | self._files,
            json.dumps({"tests": tests, "seconds": self.limits.seconds, "wanted": self.wanted}),
            replace(self.limits, seconds=max(self._ends - time.monotonic(), 0.0) + self.limits.seconds),
        )
        verdicts = ran.output.splitlines()
        for verdict in verdicts:
            _count(json.loads(verdict), counts)
        if len(verdicts) < len(tests) and not self._is_decided(counts):
            raise SandboxFailed(f"the process of the tests ended with status {ran.status}, without a verdict")

    def _functions(self, tests: Sequence[dict[str, Any]], counts: Outcomes) -> int:
        """Run tests until all are decided or one ends the answer's process; return the number decided."""
        with ExitStack() as stack:
            ours, theirs, judge, tested = (
                stack.enter_context(end) for pair in (socket.socketpair(), socket.socketpair()) for end in pair
            )
            answer = Sandbox(
                SCRIPT | ANSWER_SIDE | self._files,
                python("sandbox_rpc.py", "answer_side", str(theirs.fileno())),
                replace(self.limits, cpu_seconds=self.total_seconds + BUSY * self.limits.seconds),
                descriptors=[theirs.fileno()],
            )
            tester = Sandbox(
                SCRIPT | TESTS_SIDE,
                python("sandbox_rpc.py", "tests_side", str(ours.fileno()), str(tested.fileno())),
                replace(self.limits, seconds=2 * self.total_seconds + self.limits.seconds),
                descriptors=[ours.fileno(), tested.fileno()],
            )
            stack.enter_context(tester)  # first: it closes itself to others before the answer's code runs
            stack.enter_context(answer)
            for end in (ours, theirs, tested):
                end.close()
            judge.settimeout(START_SECONDS)
            with suppress(OSError):  # the tests' process has ended, which is handled below
                judge.sendall(json.dumps(tests).encode() + b"\n")
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
            elif exceeded := answer.exceeded(tester) or tester.exceeded():
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
    counts.add(verdict["passed"], verdict.get("exceeded", False))


def same_output(output: bytes, expected: str) -> bool:
    """True if an output is the expected one: line by line the same words, or numbers of the same value (`3.0` for `3`),
    to 1e-6 if a number with a point is expected."""
    lines, expected_lines = (_words(text) for text in (output.decode(errors="replace"), expected))
    return len(lines) == len(expected_lines) and all(
        len(words) == len(expected_words) and all(map(_same_word, words, expected_words))
        for words, expected_words in zip(lines, expected_lines, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in word + expected or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if "." in expected:
        return math.isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    return Decimal(word) == Decimal(expected)
