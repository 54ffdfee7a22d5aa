"""Threads that do not hold up the end of their process.

Python waits at exit for every thread of a `ThreadPoolExecutor`. In an actor whose cluster is gone such a thread may
wait for work, for weights or for somebody's server, and the process would stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """An executor that gives every call a daemon thread of its own. Its users bound how many there are at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn` in a new thread."""
        future: Future[T] = Future()
        Thread(target=_answer, args=(future, fn, args, kwargs), name=self.name, daemon=True).start()
        return future


def _answer(future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
        future.set_exception(error)
    else:
        future.set_result(result)
