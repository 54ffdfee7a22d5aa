"""SIGTERM as an exception, so that whatever is open is closed in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

TERMINATED = 128 + signal.SIGTERM
"""The exit code that shells give a process ended by SIGTERM."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within this context SIGTERM ends the process as an exit does, through every `with` and `finally`.

    During a flow Prefect handles it: the flow saves and ends its actors. Then Prefect sends the signal once more, to
    the handler that stood before its own; with Python's default the process would go and leave Ray behind. Further
    signals do not disturb the closing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)
