"""The child's side of a `Worker` (`base/children.py`): creates an object of a class and serves calls of its methods.

python -I child_server.py DESCRIPTOR MODULE_OR_FILE:CLASS [JSON_OF_SYS_PATH]

This file imports only the standard library, so that any Python can run it. Requests are pickled `(method, arguments)`;
the method "" creates the object. Replies are JSON, because the parent must not unpickle anything from a process that
may run a model's code: `{"result": ...}`, `{"bytes": true}` followed by a message of bytes, or `{"error": ...}`. The
object's stdout is redirected to stderr. When the parent closes the connection, the object is closed and the process
group killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pkgutil
import runpy
import signal
import sys
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class NoSuchMethod(Exception):
    """The object has no method of this name."""


class Served:
    """The served object. It is created again when other arguments are requested."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._class: Any = None
        self._object: Any = None
        self._arguments: dict[str, Any] | None = None
        self._loop = asyncio.new_event_loop()

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method:
            return self.call(method, *arguments)
        self.make(*arguments)
        return None

    def make(self, arguments: dict[str, Any], optional: dict[str, Any]) -> None:
        """Create the object with `arguments` and those of `optional` that its class takes, unless it was created with
        the same."""
        self._class = self._class or load(self._target)
        parameters = inspect.signature(self._class).parameters if optional else ()
        values = {**arguments, **{name: optional[name] for name in parameters if name in optional}}
        if self._arguments != values:
            self.close()
            self._object, self._arguments = self._class(**values), values

    def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._object, name, None)
        if method is None:
            raise NoSuchMethod(name)
        result = method(*arguments)
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def close(self) -> None:
        if getattr(self._object, "close", None) is not None:
            self.call("close")
        self._object = self._arguments = None


def load(target: str) -> Any:
    """Return the class at `package.module:Class` or `folder/file.py:Class`."""
    file, _, name = target.rpartition(":")
    if not file.endswith(".py"):
        return pkgutil.resolve_name(target)
    sys.path.append(str(Path(file).parent))
    return runpy.run_path(file)[name]


def reply(connection: Connection, served: Served, method: str, arguments: tuple[Any, ...]) -> None:
    outcome: Future[tuple[bytes, Any]] = Future()
    try:
        result = served.answer(method, arguments)
        message = {"bytes": True} if isinstance(result, bytes) else {"result": result}
        outcome.set_result((json.dumps(message, default=number).encode(), result))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the object may raise anything; the parent gets the error
        outcome.set_exception(error)
    raised = outcome.exception()
    if raised is not None:
        connection.send_bytes(json.dumps(described(raised)).encode())
        return
    header, result = outcome.result()
    connection.send_bytes(header)
    if isinstance(result, bytes):
        connection.send_bytes(result)


def number(value: Any) -> Any:
    """Return a NumPy scalar as a Python number or bool, for `json.dumps`."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} is no JSON")
    return item()


def described(raised: BaseException) -> dict[str, Any]:
    """Return an exception as a reply: text, notes, class names, a TrinityError's key, a missing module."""
    missing = raised.name if isinstance(raised, ModuleNotFoundError) else None
    kinds, key = [kind.__name__ for kind in type(raised).__mro__], getattr(raised, "key", "")
    text = " ".join(filter(None, [str(raised), *getattr(raised, "__notes__", ())]))
    return {"error": text, "kinds": kinds, "key": str(key), "missing": missing}


def main() -> None:
    descriptor, target, *path = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    os.dup2(2, 1)
    if path:
        sys.path[:] = json.loads(path[0])
    connection, served = Connection(int(descriptor)), Served(target)
    os.register_at_fork(after_in_child=connection.close)  # else the parent never sees EOF when this process ends
    try:
        while True:
            method, arguments = connection.recv()
            reply(connection, served, method, arguments)
    except (EOFError, ConnectionError):  # the parent has ended, or closed the connection
        served.close()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
