"""What crosses between an answer and its tests, and the script that runs one of the two in a sandbox.

`sandbox_rpc.py answer_side FD` answers calls; `sandbox_rpc.py tests_side FD JUDGE` tests. Only plain data crosses, as
JSON: numbers, texts, lists, dicts, NumPy's arrays, the types of `STANDARD`, and what the answer prints. Other objects
stay on their side and are referenced by number; where their class derives from such a type, their data crosses for each
comparison. So no comparison that decides a verdict ever runs an answer's code. Objects that the tests make of a class
in the row's prompt are passed on to the answer: their fields cross, once.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MODULE = "trinity_core.workflows.rewards.code.sandbox_rpc"
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
    "Counter": (Counter, dict, Counter),
    "OrderedDict": (OrderedDict, lambda it: [*it.items()], OrderedDict),
    "defaultdict": (defaultdict, dict, lambda values: defaultdict(None, values)),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "complex": (complex, lambda it: [it.real, it.imag], lambda parts: complex(*parts)),
}
"""Name -> type, conversion to JSON, and conversion back."""
NAMES = {kind: name for name, (kind, _, _) in STANDARD.items()}
SPECIALS: dict[str, Callable[..., Any]] = {
    "__iter__": iter,
    "__len__": len,
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__int__": int,
    "__float__": float,
    "__abs__": abs,
    "__neg__": operator.neg,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__enter__": lambda it: type(it).__enter__(it),
    "__exit__": lambda it, *error: type(it).__exit__(it, *error),
}
"""Method of an answer's objects that tests call by syntax -> the function that does so."""


class Unjudged(Exception):
    """The tests compare objects that only the answer's own code could compare, or pass values that cannot cross."""


def encoded(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value for JSON; `keep` returns the number of an object that is not plain, or raises."""
    if type(value) in SCALARS:
        return value
    if type(value) is list:
        return [encoded(item, keep) for item in value]
    if type(value) is dict:
        return {"d": [[encoded(key, keep), encoded(item, keep)] for key, item in value.items()]}
    if name := NAMES.get(type(value)):
        return {name: encoded(STANDARD[name][1](value), keep)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        if not getattr(value, "shape", ()) or not value.size or value.dtype.kind not in "biufc":
            return encoded(value.tolist(), keep)
        return {"a": [value.dtype.str, [*value.shape], encoded(value.ravel().tolist(), keep)]}
    return {"o": keep(value)}


def decoded(value: Any, resolve: Callable[[Any], Any]) -> Any:
    """The inverse of `encoded`. Raises ValueError for invalid values."""
    if type(value) is list:
        return [decoded(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, content)] = value.items()
    if tag == "o":
        return resolve(content)
    if tag == "d":
        return {decoded(key, resolve): decoded(item, resolve) for key, item in content}
    if tag == "a" and re.fullmatch("[<>|][biufc][0-9]+", content[0]):
        import numpy as np

        return np.array(decoded(content[2], resolve), content[0]).reshape(content[1])
    return STANDARD[tag][2](decoded(content, resolve))


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


def tried(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of `work` and None, or None and its exception."""
    try:
        return work(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an answer or a test may raise anything
        return None, error


def completed(value: Any) -> Any:
    """Return the result of a coroutine; anything else as it is."""
    if not inspect.iscoroutine(value):
        return value
    import asyncio

    return asyncio.run(value)


def loaded(side: str) -> Callable[..., None]:
    """Return the `main` of a side, which imports this module by its name in the package that is not there."""
    sys.set_int_max_str_digits(0)
    sys.modules[MODULE] = sys.modules[__name__]
    sys.path.insert(0, ".")
    if side == "answer_side":
        from answer_side import main  # type: ignore[import-not-found]
    else:
        from tests_side import main  # type: ignore[import-not-found]
    sys.path.pop(0)
    return main  # type: ignore[no-any-return]


if __name__ == "__main__":
    loaded(sys.argv[1])(*(Line(int(descriptor)) for descriptor in sys.argv[2:]))
