"""Runs workflows in an event loop of their own, so that synchronous code in one (`time.sleep`, a request without a time
limit) cannot stop the explorer. It does stop the other workflows: once one of them times out, the attempt ends with the
place that blocks them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from trinity_core.base.errors import TrinityError
from trinity_core.base.threads import Bridge, Loop
from trinity_core.base.timing import BusyTimer

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


class LoopBlocked(TrinityError):
    """A workflow does not yield, so no workflow continues."""


@dataclass(eq=False)
class WorkflowLoop:
    """Runs the workflows of one explorer. Called from the explorer's own loop."""

    _lane: _Lane | None = None

    async def run(
        self,
        work: Coroutine[Any, Any, T],
        seconds: float,
        uncounted: BusyTimer | None = None,
        limit: str = "explorer.max_timeout",
    ) -> T:
        """Run a workflow and return its result. Raises what it raises, `WorkflowTimeout` after `seconds`, in which the
        time of `uncounted` does not count, and `LoopBlocked`. `limit` is the setting that `seconds` comes from.

        Workflows started in one turn of the caller's loop start in one turn of theirs.
        """
        if self._lane is None:
            self._lane = _Lane(asyncio.get_running_loop())
        call = self._lane.inward.call(work)
        try:
            if not await _ends(call, seconds, uncounted or BusyTimer()):
                if not await self._lane.ping(min(seconds, YIELD_SECONDS)):
                    raise LoopBlocked(
                        "A workflow blocks all others: await what takes long, or give its `run` no `async`. It is at\n"
                        + self._lane.stack()
                    )
                call.cancel()
                await self._lane.ping(CANCEL_SECONDS)
                raise WorkflowTimeout(f"it took longer than {round(seconds, 2):g} s ({limit})")
        finally:
            call.cancel()
        if call.cancelled():
            raise WorkflowTimeout("it was cancelled")
        error = call.exception()
        if error is not None and not isinstance(error, Exception):
            raise WorkflowExit(f"it ended with {type(error).__name__}: {error}") from error
        return call.result()

    async def outside(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` of a workflow in the explorer's own loop. Calls made in one turn of the workflows' loop arrive in
        one turn; a workflow's plain `run` may also call from a loop of its own (`asyncio.run`)."""
        lane, loop = self._lane, asyncio.get_running_loop()
        if lane is None or loop is lane.home:
            return await work
        if loop is lane.loop:
            return await lane.outward.call(work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, lane.home))

    def close(self) -> None:
        if self._lane is not None:
            self._lane.leave()
            self._lane = None


async def _ends(call: asyncio.Future[Any], seconds: float, uncounted: BusyTimer) -> bool:
    """Wait for a call to end; False on timeout."""
    left = seconds
    while left and not call.done():
        uncounted_before = uncounted.seconds
        await asyncio.wait({call}, timeout=left)
        left = max(spent, SHORTEST_WAIT) if (spent := uncounted.seconds - uncounted_before) else 0.0
    return call.done()


class _Lane:
    """A thread with the event loop in which workflows run, and the calls in both directions."""

    def __init__(self, home: Loop) -> None:
        self.home, self.loop = home, asyncio.new_event_loop()
        self.inward, self.outward = Bridge(home, self.loop), Bridge(self.loop, home)
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="workflows", daemon=True)
        self._thread.start()

    async def ping(self, seconds: float) -> bool:
        """True if the loop responds within `seconds`."""
        answer = self.inward.call(asyncio.sleep(0))
        await asyncio.wait({answer}, timeout=seconds)
        return answer.done() or not answer.cancel()

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-3:])

    def leave(self) -> None:
        """Cancel all workflows, and end the thread as soon as it is free."""
        self._is_left = True
        self.outward.cancel()
        self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_soon(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_left:
            try:
                self.loop.run_forever()
            except BaseException as error:
                log.debug("workflows continue", exc_info=error)
        self.loop.close()
