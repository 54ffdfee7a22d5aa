"""Runs in a sandbox: tests that call an answer's functions on the other side.

The tests come from a socket, and a verdict for each goes there. This process is closed to other processes of its user,
and no file holds tests or verdicts, so an answer can neither read the former nor write the latter.
"""

from __future__ import annotations

import builtins
import ctypes
import inspect
import io
import json
import math
import operator
import sys
import types
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from trinity_core.workflows.rewards.code.sandbox_rpc import (
    NAMES,
    SCALARS,
    SPECIALS,
    Line,
    Unjudged,
    completed,
    decoded,
    encoded,
    tried,
)

PR_SET_DUMPABLE = 4
TWO_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "and_", "or_", "xor")
Output = namedtuple("Output", ["out", "err"])
PLAIN: tuple[Any, ...] = (*SCALARS, list, dict, *NAMES)


class AnswerGone(Exception):
    """The answer's process has ended, or sends nothing readable."""


class RemoteAnswer:
    """The functions and objects of an answer, called from the other side."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._objects: dict[int, Remote] = {}
        self._errors: dict[str, type[Exception]] = {}
        self.classes: Sequence[str] = ()
        """Classes of the row's prompt, which both sides have."""
        self.used = 0
        """Number of values obtained from the answer."""

    def named(self, name: str) -> Any:
        """Return the answer's object of this name. Raises NameError if there is none."""
        value = self.ask("name", name)
        self.used -= type(value) is Remote or isinstance(value, type)  # nothing has been asked of it yet
        return value

    def ask(self, request: str, *arguments: Any) -> Any:
        """Send a request to the answer's side. Raises what the answer raises, as the nearest exception known here."""
        try:
            message = json.dumps([request, encoded(list(arguments), self._passed)])
        except RecursionError:
            raise Unjudged("the tests pass a value that is nested too deeply") from None
        try:
            self.used += 1
            self._line.send(message)
            reply = self._line.receive()
            sys.stdout.write(str(reply["printed"]))
            if "raised" in reply:
                raised = self._error(**reply["raised"])
            else:
                if "changed" in reply:
                    _changed([*arguments[1:]], decoded(reply["changed"], self._object))
                value = decoded(reply["value"], self._object)
                if reply.get("given") is not None:
                    value = arguments[1][reply["given"]]
                return _later(value) if reply.get("awaited") else value
        except (EOFError, OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise AnswerGone(f"the answer's process ended or sent no value ({type(error).__name__})") from None
        raise raised

    def _passed(self, value: Any) -> Any:
        """Return an object's number, or its class's name and its fields, if the prompt defines the class."""
        if type(value) is Remote:
            return int(value.__dict__["_remote"][1])
        kind = type(value)
        if kind.__name__ in self.classes and kind.__mro__[1:] == (object,) and hasattr(value, "__dict__"):
            fields, value.__class__ = vars(value), Passed
            return [kind.__name__, encoded(fields, self._passed)]
        raise Unjudged(f"the tests pass a {kind.__name__} to the answer, and only plain data can cross")

    def _error(self, kinds: list[str], arguments: Any, text: str) -> BaseException:
        kind: type[BaseException] = next(filter(None, map(self._known_error, kinds)), Exception)
        try:
            error = kind(*decoded(arguments, self._object))
        except TypeError:  # an exception of the answer's own, with arguments of its own
            error = kind(text)
        error.__dict__["text"] = text
        return error

    def _known_error(self, name: str) -> type[BaseException] | None:
        kind = self._errors.get(name) or getattr(builtins, name, None)
        return kind if isinstance(kind, type) and issubclass(kind, Exception | SystemExit) else None

    def _object(self, number: Any) -> Any:
        """Return an object by its number, always the same, or a class of exceptions by its own and its bases' names."""
        if type(number) is int:
            return self._objects.setdefault(number, Remote(self, number))
        name, *bases = map(str, number)
        base = next(filter(None, map(self._known_error, bases)), Exception)
        members = {"__str__": lambda error: error.__dict__.get("text", ""), "__getattr__": _no_attribute}
        return self._errors.setdefault(name, type(name, (base,), members))  # type: ignore[arg-type]


def _is_answers(error: BaseException) -> bool:
    """True for an exception that the answer raised."""
    return "text" in error.__dict__


def _no_attribute(error: Exception, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise Unjudged(f"the tests read '{name}' of an exception of the answer's own, which does not cross")


async def _later(value: Any) -> Any:
    return value


def _changed(old: Any, new: Any) -> Any:
    """Return `new`, as the old list, dict, set or array with what a function has changed in it."""
    if type(old) is not type(new) or getattr(old, "shape", ()) != getattr(new, "shape", ()):
        return new
    if isinstance(old, list):
        old[:] = [*map(_changed, old, new), *new[len(old) :]]
    elif isinstance(old, tuple):
        return tuple(map(_changed, old, new))
    elif isinstance(old, dict):
        values = {key: _changed(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(values)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif hasattr(old, "shape"):
        old[...] = new
    else:
        return new
    return old


class Remote:
    """An object of the answer that is not plain data. It equals only itself, or what its data equals."""

    def __init__(self, answer: RemoteAnswer, number: int) -> None:
        self.__dict__["_remote"] = (answer, number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        answer, _ = self.__dict__["_remote"]
        return answer.ask("call", self, list(arguments), options)

    def __getattr__(self, name: str) -> Any:
        answer, _ = self.__dict__["_remote"]
        return answer.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        answer, _ = self.__dict__["_remote"]
        answer.ask("set", self, name, value)

    def __eq__(self, other_data: object) -> bool:
        data, other_data = _data(self), _data(other_data)
        if type(data) is Remote and other_data is not data and not isinstance(other_data, PLAIN):
            raise Unjudged("the tests compare objects of the answer's own classes, which only the answer could judge")
        return data is other_data if type(data) is Remote else bool(data == other_data)

    def __hash__(self) -> int:
        data = _data(self)
        return hash(data if type(data) is not Remote else self.__dict__["_remote"][1])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(_data(self))

    def __next__(self) -> Any:
        answer, _ = self.__dict__["_remote"]
        ahead = self.__dict__.setdefault("_ahead", [])
        if not ahead:
            self.__dict__["_count"] = min(2 * self.__dict__.get("_count", 0) + 1, 255)
            ahead.extend(answer.ask("next", self, self.__dict__["_count"])[::-1])
        return ahead.pop()

    def __contains__(self, value: Any) -> bool:
        try:
            return value in [*self]
        except TypeError:
            raise Unjudged("the tests ask an object of the answer's own, which is no list, what is in it") from None

    def __instancecheck__(self, one: object) -> bool:
        raise Unjudged("the tests check for a class that is the answer's own")


class Passed:
    """An object that the answer has got: what becomes of it there is not seen here."""

    def __getattribute__(self, name: str) -> Any:
        raise Unjudged("the tests use an object again that they have passed to the answer")


def _data(value: Any) -> Any:
    """Return the data of an object whose class derives from a type of plain data; anything else as it is."""
    return value.__dict__["_remote"][0].ask("data", value) if type(value) is Remote else value


def _special(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        answer, _ = self.__dict__["_remote"]
        return answer.ask("special", self, name, list(arguments))

    return method


def _two_sided(name: str) -> Callable[..., Any]:
    def method(self: Remote, other_data: Any) -> Any:
        data, other_data = _data(self), _data(other_data)
        if type(data) is type(other_data) is Remote:
            raise Unjudged(f"the tests apply '{name}' to objects of the answer's own classes")
        return NotImplemented if type(data) is Remote else getattr(operator, name)(data, other_data)

    return method


for _name in SPECIALS:
    setattr(Remote, _name, _special(_name))
for _name in TWO_SIDED:
    setattr(Remote, f"__{_name.strip('_')}__", _two_sided(_name))


def run_tests(answer: RemoteAnswer, tests: list[dict[str, Any]], say: Callable[[dict[str, Any]], None]) -> None:
    """Run the tests in order, and report for each whether it passed."""
    sys.modules["solution"] = _solution(answer)
    for test in tests:
        passed, error = tried(lambda: _passes(answer, test))  # noqa: B023 - called at once
        if isinstance(error, Unjudged):
            say({"unjudged": str(error)})
        else:
            say({"passed": bool(passed) and error is None})
        if isinstance(error, AnswerGone):
            return


def _passes(answer: RemoteAnswer, test: dict[str, Any]) -> bool:
    """Return whether a test passes. Raises what a Python test raises."""
    if "call" in test:
        actual, expected = answer.ask("method", test["call"])(*test["arguments"], **test["named"]), test["expected"]
        alone = expected[0] if test.get("wrapped") and isinstance(expected, list) and len(expected) == 1 else expected
        return same(actual, expected) or same(actual, alone)
    checks, used = Checks(), answer.used
    answer.classes = test.get("classes", ())
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    for name in test["names"]:
        with suppress(NameError):
            module.__dict__[name] = answer.named(name)
    try:
        checks.run(test["python"], module)
    except ImportError as error:
        if _is_answers(error) or (error.name or "").partition(".")[0] == "solution":
            raise
        raise Unjudged(f"the tests cannot import what they need: {error}") from None
    except NameError as error:
        if _is_answers(error) or test.get("entry") in (None, error.name):
            raise
        raise Unjudged(f"the tests use what neither they, the prompt nor the answer define: {error}") from None
    if not checks.failed and (not checks.count or answer.used == used):
        raise Unjudged(f"nothing was asserted about the answer by the test {test['quoted']}")
    return not checks.failed


class Checks:
    """Runs one Python test, prepared by `checks.py`, and counts what it checks."""

    def __init__(self) -> None:
        self.count = 0
        self.failed = False
        """True if an assertion failed and the test swallowed it, or the test has exited with an error."""
        self._ran: set[str] = set()
        self._fixtures: dict[str, Callable[..., Any]] = {}

    def run(self, source: str, module: types.ModuleType) -> None:
        """Run the module, then its test functions and classes that it has not run, as pytest and unittest would."""
        module.__dict__.update(
            __checked__=self._checked, __caught__=self._caught, __ran__=self._ran.add, __fixture__=self._fixture,
            __sized__=_sized,
        )  # fmt: skip
        with self._outcome():
            exec(compile(source, "tests", "exec"), module.__dict__)  # noqa: S102 - what this file is for
        with self._outcome():
            self._run_functions(module)
            self._run_cases(module)

    @contextmanager
    def _outcome(self) -> Iterator[None]:
        """Take an exit with an error, and pytest's own exceptions, for a failure; others are raised."""
        try:
            yield
        except SystemExit as end:
            self.failed |= _is_answers(end) or end.code not in (None, 0, False)
        except Exception:
            raise
        except BaseException as outcome:  # noqa: BLE001 - pytest's
            self.failed |= type(outcome).__name__ != "Skipped"

    def _run_functions(self, module: types.ModuleType) -> None:
        """Run test functions and classes as pytest would."""
        self._step(module, "setup_module", module)
        for name, part in [*vars(module).items()]:
            if isinstance(part, types.FunctionType) and name.startswith("test") and name not in self._ran:
                self._step(module, "setup_function", part)
                self._call(part, [])
                self._step(module, "teardown_function", part)
            elif isinstance(part, type) and name.startswith("Test") and not hasattr(part, "assertEqual"):
                self._step(part, "setup_class", part)
                for test in (member for member in dir(part) if member.startswith("test")):
                    instance = part()
                    self._step(instance, "setup", None)
                    self._step(instance, "setup_method", getattr(instance, test))
                    self._call(getattr(instance, test), getattr(part, "pytestmark", []))
                    self._step(instance, "teardown_method", getattr(instance, test))

    def _step(self, owner: Any, name: str, argument: Any) -> None:
        """Call a function that prepares tests, if there is one. It may take an argument."""
        if (step := getattr(owner, name, None)) is not None:
            completed(step(*[argument][: len(inspect.signature(step).parameters)]))

    def _run_cases(self, module: types.ModuleType) -> None:
        """Run test cases as unittest would."""
        unittest: Any = sys.modules.get("unittest")
        if unittest is None:
            return
        errors: list[BaseException] = []
        result = unittest.TestResult()
        result.addError = result.addFailure = lambda _, error: errors.append(error[1])
        result.addSubTest = lambda _, part, error: errors.append(error[1]) if error else None
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
        if errors:
            self.failed = True
            raise errors[0]
        self.failed |= not result.wasSuccessful()

    def _checked(self, value: Any) -> Any:
        self.count += 1
        return value

    def _caught(self, is_strict: bool) -> None:
        """Count an assertion that the tests swallow as failed; with `is_strict`, any exception."""
        error = sys.exception()
        self.failed |= is_strict or (isinstance(error, AssertionError) and not _is_answers(error))

    def _fixture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._fixtures[function.__name__] = function
        return function

    def _call(self, function: Callable[..., Any], marks: list[Any]) -> None:
        """Call a test function, once for each of its parametrized cases. `marks`: those of its class."""
        marks = [*marks, *getattr(function, "pytestmark", [])]
        if any(mark.name in ("skip", "xfail") or (mark.name == "skipif" and any(mark.args)) for mark in marks):
            return
        cases: list[dict[str, Any]] = [{}]
        for mark in marks:
            if mark.name == "parametrize":
                rows = _rows(*mark.args, **mark.kwargs)
                cases = [case | row for case in cases for row in rows]
        for case in cases:
            self._complete(function, case)

    def _complete(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a function with `arguments` and the fixtures that it names; return its result."""
        printed = Printed()
        fixtures: dict[str, Callable[..., Any]] = {"capsys": lambda: printed, **self._fixtures}
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in arguments and parameter.default is parameter.empty:
                if name not in fixtures:
                    raise Unjudged(f"the tests need a fixture '{name}', which code_reward does not provide")
                arguments = arguments | {name: self._complete(fixtures[name], {})}
        with redirect_stdout(printed):
            result = function(**arguments)
            return next(result) if inspect.isgenerator(result) else completed(result)


class Printed(io.StringIO):
    """pytest's fixture `capsys`."""

    def readouterr(self) -> tuple[str, str]:
        output = self.getvalue()
        self.seek(self.truncate(0))
        return Output(output, "")


def _sized(close: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of NumPy's comparisons, which fails where only one of the two is empty."""

    def compare(left: Any, right: Any, *rest: Any, **options: Any) -> Any:
        sizes = [getattr(part, "size", len(part) if hasattr(part, "__len__") else 1) for part in (left, right)]
        if (sizes[0] == 0) != (sizes[1] == 0):
            raise AssertionError("one of the two is empty")
        return close(left, right, *rest, **options)

    return compare


def _rows(argnames: Any, argvalues: Any, indirect: Any = False, **_: Any) -> list[dict[str, Any]]:
    """Return the arguments of each case of `pytest.mark.parametrize`."""
    if indirect:
        raise Unjudged("the tests parametrize a fixture, which code_reward does not provide")
    names = argnames.replace(",", " ").split() if isinstance(argnames, str) else argnames
    is_plain = isinstance(argnames, str) and len(names) == 1
    values = [row.values if hasattr(row, "marks") else [row] if is_plain else row for row in argvalues]
    return [dict(zip(names, row, strict=True)) for row in values]


def same(actual: Any, expected: Any) -> bool:
    """True if a result equals the expected one, which is JSON: a tuple is a list there, and floats agree to 1e-6."""
    actual = _data(actual)
    actual = actual.tolist() if hasattr(actual, "tolist") else actual
    if isinstance(actual, float) or isinstance(expected, float):
        numbers = type(actual) in (int, float) and type(expected) in (int, float)
        return numbers and (actual == expected or math.isclose(actual, expected, rel_tol=1e-6, abs_tol=1e-9))
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        by_key = {str(key): value for key, value in actual.items()}
        return by_key.keys() == expected.keys() and all(same(by_key[key], expected[key]) for key in expected)
    return bool(actual == expected)


def _solution(answer: RemoteAnswer) -> types.ModuleType:
    """Return the module behind `from solution import f` in tests."""
    module = types.ModuleType("solution")

    def member(name: str) -> Any:
        if not name.startswith("__"):
            with suppress(NameError):
                return answer.named(name)
        raise AttributeError(name)

    module.__dict__["__getattr__"] = member
    return module


def main(line: Line, judge: Line) -> None:
    """Run the tests that come from `judge`; send a verdict for each."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    run_tests(RemoteAnswer(line), judge.receive(most=-1), lambda verdict: judge.send(json.dumps(verdict)))
