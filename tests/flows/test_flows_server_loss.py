"""The Prefect server of `trinity run` is killed amid the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from flows.local.server import TemporaryServer, is_healthy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_temporary_server_comes_back_on_its_port(tmp_path: Path) -> None:
    server = TemporaryServer(tmp_path)
    try:
        server.wait()
        for signal_number in (signal.SIGKILL, signal.SIGTERM):
            first = server._process.pid
            os.kill(first, signal_number)
            deadline = time.monotonic() + 120
            while server._process.pid == first or not is_healthy(server.api_url):
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        server.stop()
    assert not is_healthy(server.api_url)
