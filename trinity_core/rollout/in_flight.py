"""New weights in mid-generation: the engines load each version as soon as it is published, not only between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.05
"""Between two looks for a newer version."""


async def loading_meanwhile(work: Awaitable[T], load_newest: Callable[[], Awaitable[None]]) -> T:
    """The result of `work`, during which `load_newest` is called again and again; the last call ends before this does.

    Raises what either raises. If a load fails, `work` is cancelled.
    """
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=POLL_SECONDS))[0]:
            await load_newest()
        return working.result()
    except BaseException:
        working.cancel()
        raise
