"""Calls between event loops of two threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from trinity_core.base.threads import Bridge, Loop
from trinity_core.rollout.workflow_loops import WorkflowLoop


@pytest.fixture
def there() -> Iterator[Loop]:
    """A loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


class Turns:
    """Counts the turns of a loop; every call records the one in which it began."""

    def __init__(self) -> None:
        self.turn = 0
        self.began: list[int] = []

    async def call(self, value: int, seconds: float = 0.0) -> int:
        if not self.began or self.began[-1] != self.turn:
            asyncio.get_running_loop().call_soon(self._next)
        self.began.append(self.turn)
        await asyncio.sleep(seconds)
        return value

    def _next(self) -> None:
        self.turn += 1


def test_calls_of_one_turn_begin_and_end_in_one(there: Loop) -> None:
    turns, ended = Turns(), Turns()

    async def ask(bridge: Bridge, value: int) -> int:
        return await ended.call(await bridge.call(turns.call(value)))

    async def main() -> list[int]:
        bridge = Bridge(asyncio.get_running_loop(), there)
        return await asyncio.gather(*(ask(bridge, value) for value in range(50)))

    for _ in range(20):
        turns, ended = Turns(), Turns()
        assert asyncio.run(main()) == list(range(50))
        assert len(set(turns.began)) == 1 and len(set(ended.began)) == 1


def test_errors_and_cancellations_cross(there: Loop) -> None:
    cancelled = threading.Event()

    async def fail() -> None:
        raise KeyError("there")

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        bridge = Bridge(asyncio.get_running_loop(), there)
        with pytest.raises(KeyError):
            await bridge.call(fail())
        unbegun, begun = bridge.call(wait()), bridge.call(wait())
        unbegun.cancel()
        await asyncio.sleep(0.05)
        begun.cancel()
        assert await asyncio.to_thread(cancelled.wait, 10)

    asyncio.run(main())


def test_a_plain_run_may_start_an_event_loop_of_its_own():
    """`asyncio.run` in a workflow's thread: what it asks of the explorer's models runs in the explorer's loop."""

    async def asked():
        return asyncio.get_running_loop()

    async def workflow():
        return await asyncio.to_thread(asyncio.run, loops.outside(asked()))

    async def explorer():
        try:
            return await loops.run(workflow(), 60.0), asyncio.get_running_loop()
        finally:
            loops.close()

    loops = WorkflowLoop()
    used, home = asyncio.run(explorer())
    assert used is home
