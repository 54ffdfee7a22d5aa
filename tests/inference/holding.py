"""An engine that stops in the middle of its answers until new weights arrive, whatever the machine's speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from trinity_core.rollout.inference import vllm_types

SECONDS = 60.0


@contextmanager
def held_midway(engine, tokens: int, once: bool = False) -> Iterator[threading.Event]:
    """Once `tokens` tokens are sampled, set the event; each further step (or only the next) waits until the weights
    change."""
    midway = threading.Event()
    step, held = engine._step, set()
    count = lambda: engine._finished_tokens + vllm_types.tokens_in_flight(engine._vllm)  # noqa: E731
    sampled = count()

    def step_and_wait() -> None:
        step()
        if count() - sampled <= tokens:
            return
        midway.set()
        held.add(engine.version)
        if len(held) == 1:
            deadline = time.monotonic() + SECONDS
            while engine._jobs.empty() and time.monotonic() < deadline:
                time.sleep(0.01)
            held.update([None] if once else [])

    with mock.patch.object(engine, "_step", step_and_wait):
        yield midway
