"""The child's end of a `Worker` (see `children.py`): it makes an object of a class and answers calls of its methods.

    python -I child_server.py DESCRIPTOR MODULE_OR_FILE:CLASS [JSON_OF_SYS_PATH]

This file imports the standard library alone, so that any Python can run it. Requests are pickled `(method, arguments)`;
the method "" makes the object. Replies are JSON, because the parent unpickles nothing from a process that may run a
model's code: `{"result": ...}`, `{"bytes": true}` before a message of bytes, or `{"error": ...}`. What the object
prints goes to standard error. Once the parent asks no more, the object is closed, and the process ends with its group.
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
    """The object, made again when other arguments are asked for."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._class: Any = None
        self._object: Any = None
        self._arguments: dict[str, Any] | None = None
        self._loop = asyncio.new_event_loop()

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Do what a request asks for."""
        if method:
            return self.call(method, *arguments)
        self.make(*arguments)
        return None

    def make(self, arguments: dict[str, Any], optional: dict[str, Any]) -> None:
        """Make the object with `arguments`, and those of `optional` that its class takes, unless there is just that."""
        self._class = self._class or load(self._target)
        parameters = inspect.signature(self._class).parameters if optional else ()
        wanted = {**arguments, **{name: optional[name] for name in parameters if name in optional}}
        if self._arguments != wanted:
            self.close()
            self._object, self._arguments = self._class(**wanted), wanted

    def call(self, name: str, *arguments: Any) -> Any:
        """What the method returns. Raises NoSuchMethod."""
        method = getattr(self._object, name, None)
        if method is None:
            raise NoSuchMethod(name)
        result = method(*arguments)
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def close(self) -> None:
        """Close the object, if there is one that can be closed."""
        if getattr(self._object, "close", None) is not None:
            self.call("close")
        self._object = self._arguments = None


def load(target: str) -> Any:
    """The class at `package.module:Class` or `folder/file.py:Class`."""
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return pkgutil.resolve_name(target)
    sys.path.append(str(Path(place).parent))
    return runpy.run_path(place)[name]


def reply(connection: Connection, served: Served, method: str, arguments: tuple[Any, ...]) -> None:
    """Send the answer to a request, or the exception."""
    outcome: Future[tuple[bytes, Any]] = Future()
    try:
        result = served.answer(method, arguments)
        message = {"bytes": True} if isinstance(result, bytes) else {"result": result}
        outcome.set_result((json.dumps(message, default=number).encode(), result))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the object may raise anything; the parent is told
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
    """A NumPy scalar as Python's number or flag. Raises TypeError for what is none."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} is no JSON")
    return item()


def described(raised: BaseException) -> dict[str, Any]:
    """An exception as a reply: its text, the names of its classes, a TrinityError's key, a module that is missing."""
    missing = raised.name if isinstance(raised, ModuleNotFoundError) else None
    kinds, key = [kind.__name__ for kind in type(raised).__mro__], getattr(raised, "key", "")
    return {"error": str(raised), "kinds": kinds, "key": str(key), "missing": missing}


def main() -> None:
    """Answer requests until there are no more."""
    descriptor, target, *path = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    os.dup2(2, 1)
    if path:
        sys.path[:] = json.loads(path[0])
    connection, served = Connection(int(descriptor)), Served(target)
    os.register_at_fork(after_in_child=connection.close)  # else the parent does not hear of our end
    try:
        while True:
            method, arguments = connection.recv()
            reply(connection, served, method, arguments)
    except (EOFError, ConnectionError):  # the parent has gone, or closed its end
        served.close()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
