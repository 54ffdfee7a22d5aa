"""Runs in the sandboxes, as a script: an answer's functions on one side, tests that call them on the other.

`sandbox_rpc.py answer FD` loads `solution.py` and answers calls. `sandbox_rpc.py tests FD JUDGE` reads the tests from
the socket JUDGE and writes a verdict for each to it. That process is closed to other processes of its user, and no file
holds tests or verdicts, so an answer can neither read the former nor write the latter. Only plain data crosses between
answer and tests, as JSON: numbers, texts, lists, tuples, sets, dicts, bytes, and the standard library's dates, times,
fractions, decimals, ranges and deques. Other objects stay on their side and are referenced by number, so no comparison
that decides a verdict ever runs an answer's code.
"""

from __future__ import annotations

import builtins
import inspect
import json
import math
import socket
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

PR_SET_DUMPABLE = 4
MAX_MESSAGE = 64 << 20
SCALARS = (bool, int, float, str, type(None))
KEYS: type = type({}.keys())
ITEMS: type = type({}.items())
STANDARD: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "date": (date, date.isoformat, date.fromisoformat),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (timedelta, lambda it: [it.days, it.seconds, it.microseconds], lambda parts: timedelta(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, lambda it: [it.numerator, it.denominator], lambda parts: Fraction(*parts)),
    "range": (range, lambda it: [it.start, it.stop, it.step], lambda parts: range(*parts)),
    "deque": (deque, list, deque),
    "keys": (KEYS, list, lambda values: dict.fromkeys(values).keys()),
    "items": (ITEMS, list, lambda values: dict(values).items()),
}
"""Name -> type, conversion to JSON, and conversion back."""
SPECIALS = ("__iter__", "__len__", "__getitem__", "__str__", "__repr__", "__next__", "__enter__", "__exit__")
"""Methods of an answer's objects that tests may call by syntax."""
TWO_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "and", "or", "xor")
STANDARD_KINDS = (kind for kind, _, _ in STANDARD.values())
PLAIN: tuple[Any, ...] = (*SCALARS, list, tuple, set, frozenset, dict, bytes, complex, *STANDARD_KINDS)


class Unjudged(Exception):
    """The tests compare objects that only the answer's own code could compare, or pass values that cannot cross."""


class AnswerGone(Exception):
    """The answer's process has ended, or sends nothing readable."""


def encoded(value: Any, keep: Callable[[Any], int]) -> Any:
    """Encode a value for JSON; `keep` returns the number of an object that is not plain, or raises."""
    if type(value) in SCALARS:
        return value
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encoded(value.tolist(), keep)
    if isinstance(value, dict):
        return {"d": [[encoded(key, keep), encoded(dict.__getitem__(value, key), keep)] for key in dict.keys(value)]}
    kinds: tuple[tuple[type[Iterable[Any]], str], ...] = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f"))
    for kind, tag in kinds:
        if isinstance(value, kind):
            return {tag: [encoded(one, keep) for one in kind.__iter__(value)]}
    if type(value) is bytes:
        return {"b": value.hex()}
    if type(value) is complex:
        return {"c": [value.real, value.imag]}
    for name, (kind, parts, _) in STANDARD.items():
        if type(value) is kind:
            return {"x": [name, encoded(parts(value), keep)]}
    return {"o": keep(value)}


def decoded(value: Any, known: Callable[[int], Any]) -> Any:
    """The inverse of `encoded`. Raises ValueError for invalid values."""
    if not isinstance(value, dict):
        if type(value) not in SCALARS:
            raise ValueError("no encoded value")
        return value
    [(tag, content)] = value.items()
    if tag == "d":
        return {decoded(key, known): decoded(one, known) for key, one in content}
    if tag in "ltsf":
        return {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](decoded(one, known) for one in content)
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "c":
        return complex(*content)
    if tag == "x":
        return STANDARD[content[0]][2](decoded(content[1], known))
    if tag == "o" and type(content) is int:
        return known(content)
    raise ValueError("no encoded value")


class Line:
    """One end of a connection: a message is a line of JSON."""

    def __init__(self, descriptor: int) -> None:
        self._file = socket.socket(fileno=descriptor).makefile("rwb")

    def send(self, message: str) -> None:
        self._file.write(message.encode() + b"\n")
        self._file.flush()

    def receive(self, most: int = MAX_MESSAGE) -> Any:
        """Return the next message, of at most `most` bytes (-1: any number). Raises EOFError at the end."""
        line = self._file.readline(most)
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)


class RemoteAnswer:
    """The functions and objects of an answer, called from the other side."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.used = 0
        """Number of values obtained from the answer."""
        self.raised: Exception | None = None
        """The latest exception that the answer raised."""

    def named(self, name: str) -> Any:
        """Return the answer's object of this name. Raises NameError if there is none."""
        value = self.ask("name", name)
        self.used -= isinstance(value, Remote)  # nothing has been asked of it yet
        return value

    def ask(self, what: str, *arguments: Any) -> Any:
        """Send a request to the answer's side. Raises what the answer raises, as the nearest built-in exception."""
        try:
            message = json.dumps([what, encoded(list(arguments), _number_of)])
        except RecursionError:
            raise Unjudged("the tests pass a value that is nested too deeply") from None
        try:
            self.used += 1
            self._line.send(message)
            reply = self._line.receive()
            if "raised" in reply:
                names, text = [str(name) for name in reply["raised"]], str(reply["text"])
            else:
                if reply.get("changed"):
                    _change(arguments[1], decoded(reply["changed"], self._object))
                value = decoded(reply["value"], self._object)
                return _later(value) if reply.get("awaited") else value
        except (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise AnswerGone(f"the answer's process ended or sent no value ({type(error).__name__})") from None
        kinds = (getattr(builtins, name, None) for name in names)
        error_kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
        try:
            raised = error_kind(text)
        except TypeError:  # UnicodeDecodeError and others need more arguments
            raised = Exception(text)
        self.raised = raised
        raise raised

    def _object(self, number: int) -> Remote:
        return Remote(self, number)


async def _later(value: Any) -> Any:
    return value


def _change(before: Sequence[Any], changed: Sequence[Any]) -> None:
    """Apply the changes that a function made to its list, dict and set arguments."""
    for old, new in zip(before, changed, strict=False):
        if isinstance(old, list) and isinstance(new, list):
            old[:] = new
        elif isinstance(old, dict | set) and type(new) is type(old):
            old.clear()
            old.update(new)


class Remote:
    """An object of the answer that is not plain data. It equals only itself."""

    def __init__(self, answer: RemoteAnswer, number: int) -> None:
        self.__dict__["_remote"] = (answer, number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer, _ = self.__dict__["_remote"]
        return answer.ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        answer, _ = self.__dict__["_remote"]
        return answer.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        answer, _ = self.__dict__["_remote"]
        answer.ask("set", self, name, value)

    def __eq__(self, other: object) -> bool:
        if other is not self and not isinstance(other, PLAIN):
            raise Unjudged("the tests compare objects of the answer's own classes, which only the answer could judge")
        return other is self

    def __hash__(self) -> int:
        return hash(self.__dict__["_remote"][1])

    def __instancecheck__(self, one: object) -> bool:
        raise Unjudged("the tests check for a class that is the answer's own")


def _special(name: str) -> Callable[..., Any]:
    def method(self: Remote, *arguments: Any) -> Any:
        answer, _ = self.__dict__["_remote"]
        reply = answer.ask("special", self, name, [one for one in arguments if not isinstance(one, type)])
        return iter(reply) if name == "__iter__" else reply

    return method


def _two_sided(name: str) -> Callable[..., Any]:
    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            raise Unjudged(f"the tests apply '{name}' to objects of the answer's own classes")
        return NotImplemented

    return method


for _name in SPECIALS:
    setattr(Remote, _name, _special(_name))
for _name in TWO_SIDED:
    setattr(Remote, f"__{_name}__", _two_sided(_name))


def _completed(value: Any) -> Any:
    if not inspect.iscoroutine(value):
        return value
    import asyncio

    return asyncio.run(value)


def _number_of(value: Any) -> int:
    if isinstance(value, Remote):
        return int(value.__dict__["_remote"][1])
    raise Unjudged(f"the tests pass a {type(value).__name__} to the answer, and only plain data can cross")


def serve(line: Line) -> None:
    """Load the answer and serve requests of the other side."""
    namespace = _loaded("solution.py")
    objects: list[Any] = []

    def kept(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def replied(what: str, arguments: list[Any]) -> str:
        arguments = decoded(arguments, objects.__getitem__)
        value = _done(namespace, what, arguments)
        reply: dict[str, Any] = {"awaited": True} if inspect.iscoroutine(value) else {}
        value = _completed(value)
        reply["value"] = encoded(value, kept)
        if what == "call" and value is None:
            reply["changed"] = encoded(arguments[1], kept)
        return json.dumps(reply)

    while True:
        try:
            what, arguments = line.receive()
        except EOFError:
            return
        reply, error = tried(lambda: replied(what, arguments))  # noqa: B023 - called at once
        if error is not None:
            reply = json.dumps({"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)})
        line.send(reply)


def tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the result of `work` and None, or None and its exception."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - an answer or a test may raise anything
        return None, error


def _done(namespace: dict[str, Any], what: str, operands: list[Any]) -> Any:
    match what, operands:
        case "name", [name]:
            if name not in namespace:
                raise NameError(f"name '{name}' is not defined")
            return namespace[name]
        case "method", [name]:  # a function, or a method of the class Solution
            if name not in namespace and "Solution" in namespace:
                return getattr(namespace["Solution"](), name)
            return namespace[name]
        case "call", [function, arguments, named]:
            return function(*arguments, **named)
        case "attribute", [owner, name]:
            return getattr(owner, name)
        case "set", [owner, name, value]:
            setattr(owner, name, value)
        case "special", [owner, "__iter__", _]:
            return list(owner)
        case "special", [owner, name, arguments]:
            if not hasattr(type(owner), name):
                raise TypeError(f"'{type(owner).__name__}' object has no {name}")
            return getattr(type(owner), name)(owner, *arguments)
    return None


def _loaded(path: str) -> dict[str, Any]:
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), module.__dict__)  # noqa: S102 - in a sandbox
    return module.__dict__


def run_tests(answer: RemoteAnswer, tests: list[dict[str, Any]], say: Callable[[dict[str, Any]], None]) -> None:
    """Run the tests in order, and report for each whether it passed."""
    sys.modules["solution"] = _AnswerModule(answer)
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
        actual, expected = answer.ask("method", test["call"])(*test["arguments"]), test["expected"]
        alone = expected[0] if test.get("wrapped") and isinstance(expected, list) and len(expected) == 1 else expected
        return same(actual, expected) or same(actual, alone)
    checks, used = Checks(answer), answer.used
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name in test["names"]:
        with suppress(NameError):
            namespace[name] = answer.named(name)
    try:
        checks.run(test["python"], namespace)
    except ImportError as error:
        if error is answer.raised or (error.name or "").partition(".")[0] == "solution":
            raise
        raise Unjudged(f"the tests cannot import what they need: {error}") from None
    if not checks.failed and (not checks.count or answer.used == used):
        raise Unjudged(f"nothing was asserted about the answer by the test {test['quoted']}")
    return not checks.failed


class Checks:
    """Runs one Python test, prepared by `checks.py`, and counts what it checks."""

    def __init__(self, answer: RemoteAnswer) -> None:
        self.count = 0
        self.failed = False
        """True if an assertion failed and the test swallowed it, or the test has exited with an error."""
        self._answer = answer
        self._ran: set[str] = set()
        self._fixtures: dict[str, Callable[..., Any]] = {}

    def run(self, source: str, namespace: dict[str, Any]) -> None:
        """Run the module, then its test functions and classes that it has not run, as pytest and unittest would."""
        namespace |= {
            "__checked__": self._checked, "__caught__": self._caught, "__ran__": self._ran.add,
            "__fixture__": self._fixture,
        }  # fmt: skip
        with self._outcome():
            exec(compile(source, "tests", "exec"), namespace)  # noqa: S102 - what this file is for
        with self._outcome():
            self._run_rest(namespace)

    @contextmanager
    def _outcome(self) -> Iterator[None]:
        """Take an exit with an error, and pytest's own exceptions, for a failure; others are raised."""
        try:
            yield
        except SystemExit as end:
            self.failed |= end.code not in (None, 0, False)
        except Exception:
            raise
        except BaseException as outcome:  # noqa: BLE001 - pytest's
            self.failed |= type(outcome).__name__ != "Skipped"

    def _run_rest(self, namespace: dict[str, Any]) -> None:
        for name, part in [*namespace.items()]:
            if isinstance(part, types.FunctionType) and name.startswith("test") and name not in self._ran:
                self._call(part)
            elif isinstance(part, type):
                self._run_class(name, part)

    def _checked(self, value: Any) -> Any:
        self.count += 1
        return value

    def _caught(self, is_strict: bool) -> None:
        """Count an assertion that the tests swallow as failed; with `is_strict`, any exception."""
        error = sys.exception()
        self.failed |= is_strict or (isinstance(error, AssertionError) and error is not self._answer.raised)

    def _fixture(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._fixtures[function.__name__] = function
        return function

    def _run_class(self, name: str, kind: type) -> None:
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(kind, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
                with suppress(unittest.SkipTest):
                    unittest.TestSuite([case]).debug()
        elif name.startswith("Test"):
            for method in (part for part in dir(kind) if part.startswith("test")):
                one = kind()
                for step in ("setup_method", method, "teardown_method"):
                    if hasattr(one, step):
                        self._call(getattr(one, step))

    def _call(self, function: Callable[..., Any]) -> None:
        """Call a test function, once for each of its parametrized cases."""
        marks = getattr(function, "pytestmark", [])
        if any(mark.name in ("skip", "skipif", "xfail") for mark in marks):
            return
        cases: list[dict[str, Any]] = [{}]
        for mark in marks:
            if mark.name == "parametrize":
                named, rows = mark.args
                names = named.replace(",", " ").split() if isinstance(named, str) else named
                is_plain = isinstance(named, str) and len(names) == 1
                values = [row.values if hasattr(row, "marks") else [row] if is_plain else row for row in rows]
                cases = [case | dict(zip(names, row, strict=True)) for case in cases for row in values]
        for case in cases:
            self._complete(function, case)

    def _complete(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a function with `arguments` and the fixtures that it names; return its result."""
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in arguments and parameter.default is parameter.empty:
                if name not in self._fixtures:
                    raise Unjudged(f"the tests need a fixture '{name}', which code_reward does not provide")
                arguments = arguments | {name: self._complete(self._fixtures[name], {})}
        result = function(**arguments)
        return next(result) if inspect.isgenerator(result) else _completed(result)


def same(actual: Any, expected: Any) -> bool:
    """True if a result equals the expected one, which is JSON: a tuple is a list there, and floats agree to 1e-6."""
    if isinstance(actual, float) or isinstance(expected, float):
        numbers = type(actual) in (int, float) and type(expected) in (int, float)
        return numbers and (actual == expected or math.isclose(actual, expected, rel_tol=1e-6, abs_tol=1e-9))
    if isinstance(actual, list | tuple) and isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in actual.items()}
        return named.keys() == expected.keys() and all(same(named[key], expected[key]) for key in expected)
    return bool(actual == expected)


class _AnswerModule(types.ModuleType):
    """The module behind `from solution import f` in tests."""

    def __init__(self, answer: RemoteAnswer) -> None:
        super().__init__("solution")
        self.__dict__["_answer"] = answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["_answer"].named(name)
        except NameError as error:
            raise AttributeError(str(error)) from None


def main() -> None:
    sys.set_int_max_str_digits(0)
    side, line = sys.argv[1], Line(int(sys.argv[2]))
    if side == "answer":
        serve(line)
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    judge = Line(int(sys.argv[3]))
    run_tests(RemoteAnswer(line), judge.receive(most=-1), lambda verdict: judge.send(json.dumps(verdict)))


if __name__ == "__main__":
    main()
