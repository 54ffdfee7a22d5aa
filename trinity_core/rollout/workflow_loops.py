"""Runs workflows in a separate event loop, so that one that does not yield cannot stop the explorer.

A workflow in synchronous code (`time.sleep`, a request without a time limit, an endless loop) blocks all others. When
one of them times out, the blocking one is ended: by raising an exception in its code if Python can, otherwise by
abandoning its thread. The others then start over in a new loop, which does not count as a retry.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from trinity_core.threads import Bridge, Interrupted, Loop, interrupt
from trinity_core.timing import BusyTimer

log = logging.getLogger(__name__)

T = TypeVar("T")
CANCEL_SECONDS = 5.0
"""Time for a timed-out workflow to react to its cancellation."""
SHORTEST_WAIT = 1.0
"""Interval of checks whether a workflow still waits for a verifier."""
YIELD_SECONDS = 60.0
"""Longest stretch of synchronous code in a workflow once another one has timed out."""


class WorkflowTimeout(Exception):
    """A workflow took longer than `explorer.max_timeout`."""


class WorkflowExit(Exception):
    """A workflow tried to end the process, for instance with `sys.exit`."""


@dataclass(eq=False)
class WorkflowLoops:
    """Runs the workflows of one explorer, in one loop at a time. Called from the explorer's own loop."""

    _present: _Lane | None = None
    _left_behind: WeakSet[Loop] = field(default_factory=WeakSet)
    _freeing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        seconds: float,
        uncounted: Callable[[], BusyTimer] = BusyTimer,
    ) -> T:
        """Run a workflow and return its result. Raises what it raises, and `WorkflowTimeout` after `seconds`.

        The time of `uncounted()` does not count. It is the timer of the last `work()`, since an abandoned one may keep
        its own running. Workflows started in one turn of the caller's loop start in one turn of theirs.
        """
        while True:
            lane = self._lane()
            call = lane.inward.call(work())
            try:
                in_time = await self._wait(lane, call, seconds, uncounted())
                if not in_time:
                    call.cancel()
                    await lane.ping(CANCEL_SECONDS)
                    raise WorkflowTimeout(f"it took longer than {seconds:g} s (explorer.max_timeout)")
            finally:
                call.cancel()
            if not call.cancelled():
                return _result(call)
            if not lane.is_left:
                raise WorkflowTimeout("it was cancelled")

    async def outside(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` of a workflow in the explorer's own loop. Calls made in one turn arrive in one turn."""
        running = asyncio.get_running_loop()
        if running in self._left_behind:
            work.close()
            raise Interrupted
        if self._present is not None and running is self._present.loop:
            return await self._present.outward.call(work)
        return await work

    def close(self) -> None:
        if self._present is not None:
            self._leave(self._present)

    def _lane(self) -> _Lane:
        if self._present is None:
            self._present = _Lane(asyncio.get_running_loop())
        return self._present

    async def _wait(self, lane: _Lane, call: asyncio.Future[Any], seconds: float, uncounted: BusyTimer) -> bool:
        """Wait for a call to end; False on timeout. Time in which another workflow blocked it does not count."""
        while True:
            began, left = time.monotonic(), seconds
            while left and not call.done():
                before = uncounted.seconds
                await asyncio.wait({call}, timeout=left)
                left = max(spent, SHORTEST_WAIT) if (spent := uncounted.seconds - before) else 0.0
            if call.done():
                return True
            async with self._freeing:
                if not call.done() and not await lane.ping(min(seconds, YIELD_SECONDS)):
                    await self._free(lane, call)
            if not call.done() and (lane.freed_at < began or lane.culprit is call):
                return False

    async def _free(self, lane: _Lane, overdue: asyncio.Future[Any]) -> None:
        """End the workflow that blocks the loop: the running one if known, otherwise the overdue one."""
        lane.culprit = lane.running() or overdue
        log.warning("a workflow blocks all others and is ended; it is at\n%s", lane.stack())
        lane.interrupt()
        if not await lane.ping(CANCEL_SECONDS):
            self._leave(lane)
        lane.freed_at = time.monotonic()

    def _leave(self, lane: _Lane) -> None:
        self._present = None
        self._left_behind.add(lane.loop)
        lane.leave()


class _Lane:
    """A thread with the event loop in which workflows run, and the calls in both directions."""

    def __init__(self, home: Loop) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._begin)
        self.inward, self.outward = Bridge(home, self.loop), Bridge(self.loop, home)
        self.culprit: asyncio.Future[Any] | None = None
        """The last call that blocked the others."""
        self.freed_at = -math.inf
        self.is_left = False
        self._owners: WeakKeyDictionary[asyncio.Task[Any], ref[asyncio.Task[Any]]] = WeakKeyDictionary()
        """Task -> the workflow's task that it belongs to. Values are weak references: a strong one would keep its key
        alive, and with it the experiences that the workflow returned."""
        self._thread = threading.Thread(target=self._run, name="workflows", daemon=True)
        self._thread.start()

    async def ping(self, seconds: float) -> bool:
        """True if the loop responds within `seconds`."""
        answer = self.inward.call(asyncio.sleep(0))
        await asyncio.wait({answer}, timeout=seconds)
        return answer.done() or not answer.cancel()

    def running(self) -> asyncio.Future[Any] | None:
        """Return the call whose workflow is running."""
        task = asyncio.current_task(self.loop)
        owner = None if task is None else self._owners.get(task)
        return None if owner is None else self.inward.caller_of(owner())

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-3:])

    def interrupt(self) -> None:
        interrupt(self._thread.ident or 0)

    def leave(self) -> None:
        """Fail the waits for its workflows, and end them as soon as the thread is free."""
        self.is_left = True
        if self.culprit is not None and not self.culprit.done():
            self.culprit.set_exception(Interrupted())
        for call in self.inward.calls.copy():
            call.cancel()
        self.outward.cancel()
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self.is_left:
            try:
                self.loop.run_forever()
            except BaseException as error:
                log.debug("workflows go on", exc_info=error)
        self.loop.close()

    def _begin(self, loop: Loop, work: Any, **named: Any) -> asyncio.Task[Any]:
        parent = asyncio.current_task(loop)
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **named)
        own = ref(task)
        self._owners[task] = own if parent is None else self._owners.get(parent, own)
        return task


def _result(call: asyncio.Future[T]) -> T:
    error = call.exception()
    if isinstance(error, Interrupted):
        raise WorkflowTimeout("it did not yield to other workflows in time: await, or give `run` no `async`") from error
    if error is not None and not isinstance(error, Exception):
        raise WorkflowExit(f"it ended with {type(error).__name__}: {error}") from error
    return call.result()
