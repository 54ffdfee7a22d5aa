"""Studio as a server of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from ports import free_port

from trinity_core.base.gate import server_key

IDLE = """(() => {
    const now = performance.now(), app = document.querySelector('[data-testid=stApp]')
    const isBusy = app?.dataset.testScriptState !== 'notRunning' || document.querySelector('[data-testid=stSkeleton]')
    window.busyAt = isBusy ? now : window.busyAt ?? now
    return now - Math.max(window.busyAt, window.actedAt ?? 0) > 500
})()"""
"""Streamlit has drawn the page: for half a second it has run nothing and loaded no widget's code, and nothing was
clicked or typed. Just after an action its server has not heard of it."""


@dataclass(frozen=True)
class Served:
    """A Studio that runs."""

    address: str
    root: Path
    """Where it was started."""

    @property
    def login(self) -> tuple[str, str]:
        """The user and the password that it asks for."""
        user, _, password = server_key(self.root).partition(":")
        return user, password

    @property
    def page(self) -> str:
        """Its address for a browser that does not know the key yet."""
        return self.address.replace("://", f"://{server_key(self.root)}@")


@contextmanager
def serve(root: Path, *options: str) -> Iterator[Served]:
    """Studio with the runs below `root/checkpoints`, without Prefect."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "studio", "--port", str(port), *options]
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    studio = subprocess.Popen(command, cwd=root, env=env)
    try:
        deadline = time.monotonic() + 240  # a busy machine imports slowly
        while not _is_up(address):
            assert studio.poll() is None and time.monotonic() < deadline, "Studio does not answer"
            time.sleep(0.1)
        yield Served(address, root)
    finally:
        studio.terminate()
        studio.wait(30)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/_stcore/health").is_success
    except httpx.TransportError:
        return False
