"""Threads that do not hold up the end of their process.

Python waits at exit for every thread of a `ThreadPoolExecutor`. In an actor whose cluster is gone such a thread may
wait for work, for weights or for somebody's server, and the process would stay for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Thread, get_ident
from typing import Any, ParamSpec, TypeVar

from trinity_core.waits import is_readable

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


class Interrupted(BaseException):
    """Raised by `interrupt`. Not an Exception, which the code that is to end may catch and ignore."""


def interrupt(thread_id: int) -> None:
    """Raise `Interrupted` in a thread as soon as it runs Python code: not while it sleeps or waits in a C function."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(Interrupted))


class InterruptibleThreads(DaemonThreads):
    """Daemon threads whose calls can be cancelled while they run: they are interrupted."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call `fn` in a new thread."""
        future: _InterruptibleFuture[T] = _InterruptibleFuture()

        def call() -> T:
            future.thread_id = get_ident()
            return fn(*args, **kwargs)

        Thread(target=_answer, args=(future, call, (), {}), name=self.name, daemon=True).start()
        return future


class _InterruptibleFuture(Future[T]):
    thread_id: int | None = None

    def cancel(self) -> bool:
        if not super().cancel() and not self.done() and self.thread_id is not None:
            interrupt(self.thread_id)
        return self.cancelled()


def _answer(future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - the caller gets it from the future
        future.set_exception(error)
    else:
        future.set_result(result)


def end_with(other: int, also: Sequence[int] = ()) -> None:
    """Kill this process, and first the processes `also`, as soon as the process `other` has ended."""
    watched = os.pidfd_open(other)

    def watch() -> None:
        is_readable(watched, None)
        for process in (*also, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    Thread(target=watch, name=f"end-with-{other}", daemon=True).start()
