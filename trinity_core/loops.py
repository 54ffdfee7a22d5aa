"""Calling coroutines of one event loop from another, in another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


class RunsElsewhere(Protocol):
    """Runs a coroutine in another event loop, for a caller in this one (`WorkflowLoops.outside`)."""

    async def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`."""
        ...


async def in_this_loop(work: Coroutine[Any, Any, T]) -> T:
    """A `RunsElsewhere` where caller and work share a loop."""
    return await work


@dataclass(eq=False)
class Bridge:
    """Runs coroutines in the loop `there` for callers in the loop `here`.

    Calls made in one turn of `here` begin in one turn of `there`, and results of one turn arrive in one turn, however
    the threads are scheduled: what is batched by turns of a loop stays together.
    """

    here: Loop
    there: Loop
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    """Those that have not ended."""
    _leaving: list[tuple[Coroutine[Any, Any, Any], asyncio.Future[Any]]] = field(default_factory=list)
    _running: dict[asyncio.Future[Any], asyncio.Task[Any]] = field(default_factory=dict)
    _returning: list[tuple[asyncio.Future[Any], asyncio.Task[Any]]] = field(default_factory=list)

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work`; its result, as a future of `here`. Cancelling that cancels the work."""
        future: asyncio.Future[T] = self.here.create_future()
        self.calls.add(future)
        future.add_done_callback(self._ended)
        if not self._leaving:
            self.here.call_soon(self._leave)
        self._leaving.append((work, future))
        return future

    def caller_of(self, task: asyncio.Task[Any] | None) -> asyncio.Future[Any] | None:
        """The future of the call that runs as `task` in `there`; None if none does."""
        return next((future for future, running in self._running.copy().items() if running is task), None)

    def cancel(self) -> None:
        """Cancel all calls; to be called in `there`."""
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
        self.calls.discard(future)
        if future.cancelled():
            _soon(self.there, self._cancel, future)

    def _deliver(self, results: list[tuple[asyncio.Future[Any], asyncio.Task[Any]]]) -> None:
        for future, task in results:
            if task.cancelled():
                future.cancel()
            elif future.done():
                task.exception()  # retrieved: nobody waits for it
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
    with suppress(RuntimeError):  # the loop is closed: nobody is left there to whom it matters
        loop.call_soon_threadsafe(callback, *arguments)
