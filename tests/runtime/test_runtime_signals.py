"""SIGTERM closes what is open."""

from __future__ import annotations

import os
import signal

import pytest

from trinity_core.program import TERMINATED, ending_on_sigterm


def test_sigterm_closes_open_contexts_and_is_then_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    closed = []
    with pytest.raises(SystemExit) as ended, ending_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            closed.append(True)
    assert ended.value.code == TERMINATED and closed
    assert signal.getsignal(signal.SIGTERM) is before
