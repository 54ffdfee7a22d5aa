"""Threads that do not delay the end of their process.

At exit, Python waits for every thread of a `ThreadPoolExecutor`. In an actor whose cluster is gone, such a thread may
wait forever for work, weights or another server.

`Bridge` calls coroutines in another thread's event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread, get_ident, local
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import finalize

from trinity_core.base.waits import is_readable

P = ParamSpec("P")
T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


class DaemonThreads(Executor):
    """An executor that runs every call in its own daemon thread, with the caller's context variables. Callers bound the
    number of threads."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._begin(future, fn, *args, **kwargs)
        return future

    def _begin(self, future: Future[T], fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None:
        answer = (_answer, future, fn, args, kwargs)
        Thread(target=copy_context().run, args=answer, name=self.name, daemon=True).start()


class DaemonThread(DaemonThreads):
    """An executor that runs calls one after the other in a daemon thread, which ends when the executor is deleted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        calls = self._calls = SimpleQueue[Callable[[], None] | None]()
        Thread(target=_run_all, args=(calls,), name=name, daemon=True).start()
        finalize(self, calls.put, None)

    def _begin(self, future: Future[T], fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._calls.put(partial(copy_context().run, _answer, future, fn, args, kwargs))


def _run_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # frees its arguments, which may reference the executor


class Interrupted(BaseException):
    """Raised by `interrupt`. A BaseException, so that the interrupted code does not catch and ignore it as an
    Exception."""


def interrupt(thread_id: int) -> None:
    """Raise `Interrupted` in a thread as soon as it runs Python code: not while it sleeps or waits in a C function."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(Interrupted))


class InterruptibleThreads(DaemonThreads):
    """Daemon threads whose running calls can be cancelled: they are interrupted, and their `tied` futures are
    cancelled."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: _InterruptibleFuture[T] = _InterruptibleFuture()

        def call() -> T:
            future.thread_id = get_ident()
            _thread.call = future
            return fn(*args, **kwargs)

        self._begin(future, call)
        return future


class _InterruptibleFuture(Future[T]):
    thread_id: int | None = None
    interrupted = False

    def __init__(self) -> None:
        super().__init__()
        self.tied: set[Future[Any]] = set()

    def cancel(self) -> bool:
        if not super().cancel() and not self.done() and self.thread_id is not None:
            self.interrupted = True
            interrupt(self.thread_id)
            for future in self.tied.copy():
                future.cancel()
        return self.cancelled()


_thread = local()
"""`call`: the future of the call that a thread of `InterruptibleThreads` is running."""


def tied(future: Future[T]) -> Future[T]:
    """Return the same future, now cancelled together with the `InterruptibleThreads` call of this thread, if any.

    A thread that waits in `Future.result` cannot be interrupted, and would leave the awaited work running.
    """
    call: _InterruptibleFuture[Any] | None = getattr(_thread, "call", None)
    if call is not None:
        call.tied.add(future)
        future.add_done_callback(call.tied.discard)
        if call.interrupted:
            future.cancel()
    return future


def call_in(loop: Loop, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in another thread's event loop and return its result. The work is `tied` to this thread's call."""
    return tied(asyncio.run_coroutine_threadsafe(work, loop)).result()


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
    """Kill the processes `also` and then this process as soon as the process `other` has ended."""
    watched = os.pidfd_open(other)

    def watch() -> None:
        is_readable(watched, None)
        for process in (*also, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    Thread(target=watch, name=f"end-with-{other}", daemon=True).start()


class RunsElsewhere(Protocol):
    """Runs a coroutine in another event loop, for a caller in this one (`WorkflowLoops.outside`)."""

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T: ...


async def in_this_loop(work: Coroutine[Any, Any, T]) -> T:
    """A `RunsElsewhere` for a caller that shares its loop with the work."""
    return await work


@dataclass(eq=False)
class Bridge:
    """Runs coroutines in the loop `there` for callers in the loop `here`.

    Calls made in one iteration of `here` start in one iteration of `there`, and results of one iteration arrive in one,
    however the threads are scheduled. So batching by loop iterations is preserved.
    """

    here: Loop
    there: Loop
    _leaving: list[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]] = field(default_factory=list)
    _running: dict[asyncio.Future[Any], asyncio.Task[Any]] = field(default_factory=dict)
    _returning: list[tuple[asyncio.Future[Any], asyncio.Task[Any]]] = field(default_factory=list)

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` and return its result as a future of `here`. Cancelling the future cancels the work."""
        future: asyncio.Future[T] = self.here.create_future()
        future.add_done_callback(self._ended)
        if not self._leaving:
            self.here.call_soon(self._leave)
        self._leaving.append((work, future))
        return future

    def cancel(self) -> None:
        """Cancel all calls. Must be called in `there`."""
        for task in self._running.copy().values():
            task.cancel()

    # ---- in `here` ----

    def _leave(self) -> None:
        calls, self._leaving = self._leaving, []
        for work, future in calls:
            if future.done():
                work.close()
        if left := [call for call in calls if not call[1].done()]:
            self.there.call_soon_threadsafe(self._arrive, left)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            _soon(self.there, self._cancel, future)

    def _deliver(self, results: list[tuple[asyncio.Future[Any], asyncio.Task[Any]]]) -> None:
        for future, task in results:
            if task.cancelled():
                future.cancel()
            elif future.done():
                task.exception()  # marks the exception as retrieved: nobody waits for it
            elif error := task.exception():
                future.set_exception(error)
            else:
                future.set_result(task.result())

    # ---- in `there` ----

    def _arrive(self, calls: list[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]]) -> None:
        for work, future in calls:
            task = self.there.create_task(work)
            self._running[future] = task
            task.add_done_callback(partial(self._done, future))

    def _cancel(self, future: asyncio.Future[Any]) -> None:
        if task := self._running.get(future):
            task.cancel()

    def _done(self, future: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        del self._running[future]
        if not self._returning:
            self.there.call_soon(self._return)
        self._returning.append((future, task))

    def _return(self) -> None:
        results, self._returning = self._returning, []
        _soon(self.here, self._deliver, results)


def _soon(loop: Loop, callback: Any, *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody needs the callback
        loop.call_soon_threadsafe(callback, *arguments)
