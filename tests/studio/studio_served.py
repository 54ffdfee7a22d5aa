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

from studio.settings import TOKEN_VARIABLE


@dataclass(frozen=True)
class Served:
    """A Studio that runs."""

    address: str
    root: Path
    """Where it was started."""


@contextmanager
def serve(root: Path, *options: str, token: str = "") -> Iterator[Served]:
    """Studio with the runs below `root/checkpoints`, without Prefect."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "studio", "--port", str(port), *options]
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    studio = subprocess.Popen(command, cwd=root, env=env | {TOKEN_VARIABLE: token})
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
