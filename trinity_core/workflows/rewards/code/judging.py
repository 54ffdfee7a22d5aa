"""Whether an answer's program passes unit tests; the verdict is made where the answer cannot write."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity_core.waits import is_readable
from trinity_core.workflows.rewards.code import inside
from trinity_core.workflows.rewards.code.cases import Tests
from trinity_core.workflows.rewards.code.inside import Unjudged
from trinity_core.workflows.rewards.code.sandbox import (
    LOOK_SECONDS,
    CodeLimits,
    Sandbox,
    SandboxFailed,
    python,
    run_program,
)

INSIDE = Path(inside.__file__).read_text(encoding="utf-8")


@dataclass
class Tally:
    """How many tests passed, and how many went beyond a limit."""

    passed: int = 0
    failed: int = 0
    exceeded: int = 0

    def add(self, passed: bool, exceeded: str = "") -> None:
        """Count one more."""
        self.passed += passed
        self.failed += not passed
        self.exceeded += bool(exceeded)


@dataclass
class Judging:
    """Runs the tests of one answer, until `total_seconds` are over; after the first failure unless all are `wanted`."""

    code: str
    limits: CodeLimits
    wanted: bool
    total_seconds: float

    def tally(self, tests: Tests) -> Tally:
        """The result. Raises `SandboxFailed`, `Unjudged` or TimeoutError if there is none."""
        self._ends = time.monotonic() + self.total_seconds
        tally = Tally()
        for program in tests.programs:
            if self._is_decided(tally):
                return tally
            self._check_time()
            ran = run_program({"solution.py": self.code}, python("solution.py"), program.given, self.limits)
            tally.add(not ran.exceeded and same_output(ran.output, program.expected), ran.exceeded)
        left = list(tests.functions)
        while left and not self._is_decided(tally):
            self._check_time()
            left = left[self._functions(left, tests.setup, tally) :]
        return tally

    def _is_decided(self, tally: Tally) -> bool:
        return tally.failed > 0 and not self.wanted

    def _check_time(self) -> None:
        if time.monotonic() > self._ends:
            raise TimeoutError(f"the tests took longer than {self.total_seconds:g} s together (total_seconds)")

    def _functions(self, tests: Sequence[dict[str, Any]], setup: str, tally: Tally) -> int:
        """Run tests until one ends the answer's process, at most all; how many were decided."""
        with ExitStack() as stack:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            verdicts, said = os.pipe()
            reading = stack.enter_context(os.fdopen(verdicts, "rb"))
            writing = stack.enter_context(os.fdopen(said, "wb"))
            answer = Sandbox(
                {"solution.py": self.code, "inside.py": INSIDE},
                python("inside.py", "answer", str(theirs.fileno())),
                self.limits,
                descriptors=[theirs.fileno()],
            )
            tester = Sandbox(
                {"tests.json": json.dumps({"setup": setup, "tests": tests}), "inside.py": INSIDE},
                python("inside.py", "tests", str(ours.fileno()), str(said)),
                replace(self.limits, seconds=2 * self.total_seconds + self.limits.seconds),
                descriptors=[ours.fileno(), said],
            )
            stack.enter_context(answer)
            stack.enter_context(tester)
            for end in (ours, theirs, writing):
                end.close()
            return self._read(reading.fileno(), answer, tester, len(tests), tally)

    def _read(self, verdicts: int, answer: Sandbox, tester: Sandbox, count: int, tally: Tally) -> int:
        """Read verdicts until all are there, one is enough, or there will be no more."""
        text, done = b"", 0
        while done < count and not self._is_decided(tally):
            if is_readable(verdicts, LOOK_SECONDS):
                piece = os.read(verdicts, 1 << 16)
                if not piece:
                    return self._silent(tester, tally, done)
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    _count(json.loads(line), tally)
                    done += 1
                    answer.restart_clock()
            elif exceeded := answer.exceeded() or tester.exceeded():
                tally.add(False, exceeded)
                return done + 1
            self._check_time()
        return done

    def _silent(self, tester: Sandbox, tally: Tally, done: int) -> int:
        """The tests ended: after the answer's process did, which is a verdict, or by themselves, which is none."""
        try:
            status = tester.process.wait(LOOK_SECONDS * 100)
        except subprocess.TimeoutExpired:
            status = None
        if status != 0 or not done:
            raise SandboxFailed(f"the process of the tests ended with status {status}, without a verdict")
        return done


def _count(verdict: dict[str, Any], tally: Tally) -> None:
    if "unjudged" in verdict:
        raise Unjudged(verdict["unjudged"])
    tally.add(verdict["passed"])


def same_output(output: bytes, expected: str) -> bool:
    """Whether an output is the expected one: line by line the same words, numbers with a point to 1e-6."""
    lines, wanted = (_words(text) for text in (output.decode(errors="replace"), expected))
    return len(lines) == len(wanted) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(lines, wanted, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if "." not in expected:
        return False
    try:
        return math.isclose(float(given), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
