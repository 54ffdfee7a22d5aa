"""An engine that stops amid its answers until new weights come, however quick or busy the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

SECONDS = 60.0


@contextmanager
def held_amid(engine, tokens: int) -> Iterator[threading.Event]:
    """Once so many tokens were sampled, the event is set, and each further step waits for a job until other weights are
    loaded than those of that moment."""
    backend, amid = engine._backend, threading.Event()
    step, sampled, held = backend._step, backend.sampled(), set()

    def step_and_wait() -> None:
        step()
        if backend.sampled() - sampled <= tokens:
            return
        amid.set()
        held.add(backend.version)
        if len(held) == 1:
            deadline = time.monotonic() + SECONDS
            while backend._jobs.empty() and time.monotonic() < deadline:
                time.sleep(0.01)

    with mock.patch.object(backend, "_step", step_and_wait):
        yield amid
