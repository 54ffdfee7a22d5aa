"""Serves one environment over pipes: a request is a line of JSON on standard input, and so is its reply on standard
output. Run by `process.py`, with any Python: this file imports the standard library alone.

    python -I host.py MODULE_OR_FILE:CLASS

The first request makes the environment: `["make", [ARGUMENTS, COLUMNS]]`. What the environment itself prints goes to
standard error. When standard input ends, the environment is closed, and the process ends with all that it started.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pkgutil
import queue
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TextIO

CALLS = ("reset", "step", "tools")
CLOSE_SECONDS = 5.0
"""To close the environment once nobody asks any more."""


def main() -> None:
    """Import the environment's class, say so, and answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    served: list[Hosted] = []

    def imported() -> list[Any]:
        served.append(Hosted(load(sys.argv[1])))
        return []

    _reply(replies, imported)
    while served and (line := requests.get()):
        _reply(replies, partial(served[0].answered, line))
    if served:
        served[0].close()
    os.killpg(0, signal.SIGKILL)


class Hosted:
    """One environment at a time, made anew when other arguments are asked for."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._environment: Any = None
        self._arguments: dict[str, Any] | None = None
        self._loop = asyncio.new_event_loop()

    def answered(self, line: str) -> Any:
        """The result of a request, a line of JSON."""
        call, arguments = json.loads(line)
        if call == "make":
            return self.make(*arguments)
        if call not in CALLS:
            raise ValueError(f"there is no call {call!r}")
        return self._called(call, *arguments)

    def make(self, arguments: dict[str, Any], columns: dict[str, Any]) -> list[Any]:
        """Make the environment, of whose arguments `columns` may hold some, unless there is just that one."""
        named = inspect.signature(self._kind).parameters if columns else ()
        wanted = {**arguments, **{name: columns[name] for name in named if name in columns}}
        if self._arguments != wanted:
            self.close()
            self._environment, self._arguments = self._kind(**wanted), wanted
        return []

    def close(self) -> None:
        """Close the environment, if there is one."""
        if self._environment is not None:
            self._called("close")
        self._environment = self._arguments = None

    def _called(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._environment, name, None)
        if method is None:
            return []
        found = method(*arguments)
        return self._loop.run_until_complete(found) if inspect.isawaitable(found) else found


def load(target: str) -> Any:
    """The class at `package.module:Class` or `folder/file.py:Class`."""
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return pkgutil.resolve_name(target)
    sys.path.append(str(Path(place).parent))
    return runpy.run_path(place)[name]


def _reply(replies: TextIO, answer: Callable[[], Any]) -> None:
    """Write what `answer()` returns, or why it raised."""
    outcome: Future[str] = Future()
    try:
        outcome.set_result(json.dumps({"result": answer()}))
    except Exception as error:  # noqa: BLE001 - an environment may raise anything; the parent is told
        outcome.set_exception(error)
    raised = outcome.exception()
    if raised is not None:
        absent = raised.name if isinstance(raised, ModuleNotFoundError) else None
        text = json.dumps({"error": f"{type(raised).__name__}: {raised}", "missing": absent})
    else:
        text = outcome.result()
    replies.write(text + "\n")
    replies.flush()


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    requests.put("")  # the parent has gone or has no more to ask
    time.sleep(CLOSE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
