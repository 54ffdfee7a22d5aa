"""How `trinity run` loses the Prefect server that it has started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from flows.local.server import is_healthy


def lose_server(run: subprocess.Popen[bytes], root: Path, said: Path) -> None:
    """Kill the server, let it come back, kill it so that it cannot be started again. `said` is what the run prints."""
    process = psutil.Process(run.pid)

    def wait_until(true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not true():
            assert run.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.1)

    wait_until(lambda: "Beginning flow run" in said.read_text())
    first = server_of(process)
    assert first is not None
    port = first.cmdline()[first.cmdline().index("--port") + 1]
    first.kill()
    wait_until(lambda: server_of(process) not in (None, first) and is_healthy(f"http://127.0.0.1:{port}/api"))
    second = server_of(process)
    assert second is not None
    needed(root).write_text("raise SystemExit('no server here')")
    second.kill()


def give_back(root: Path) -> None:
    """Let a server start here again."""
    needed(root).unlink()


def needed(root: Path) -> Path:
    """A module that a server imports, and that it finds in its own folder first."""
    return root / "aiosqlite.py"


def server_of(run: psutil.Process) -> psutil.Process | None:
    """The one that serves the whole of Prefect's API; None while there is none."""
    for child in run.children():
        with suppress(psutil.Error):  # it has just ended
            if "prefect.server.api.server:create_app" in child.cmdline():
                return child
    return None
