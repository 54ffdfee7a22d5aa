"""How an engine in this process ends, with a fake vLLM engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from trinity_core.rollout.inference.in_process import InProcessEngine
from trinity_core.rollout.inference.requests import EngineLost, Request, Sampling
from trinity_core.rollout.inference.settings import EngineSettings


class Steps:
    """A fake vLLM engine with one step that lasts until `go_on`."""

    def __init__(self) -> None:
        self.engine_core = self
        self.stepping, self.go_on = threading.Event(), threading.Event()
        self.let_go_on = ""

    def add_request(self, *_: Any, **__: Any) -> None: ...

    def step(self) -> list[Any]:
        self.stepping.set()
        assert self.go_on.wait(60)
        return []

    def shutdown(self) -> None:
        self.let_go_on = threading.current_thread().name


async def stopped(engine: Steps, go_on_after: float | None) -> str:
    """Stop a backend in the middle of a step; return the thread that released vLLM's engine."""
    backend = InProcessEngine(EngineSettings("model", 64))
    backend._build = lambda: engine  # type: ignore[method-assign, assignment, return-value]
    await backend.start()
    asked = asyncio.ensure_future(backend.generate([Request("r", np.ones(4, np.int32), Sampling(max_tokens=4), 1)]))
    await asyncio.to_thread(engine.stepping.wait, 60)
    if go_on_after is not None:
        threading.Timer(go_on_after, engine.go_on.set).start()
    await backend.stop()
    let_go_on = engine.let_go_on
    engine.go_on.set()
    with pytest.raises(EngineLost):
        await asked
    return let_go_on


def test_stopped_engine_is_released_by_its_own_thread() -> None:
    assert asyncio.run(stopped(Steps(), go_on_after=0.2)) == "vllm"
