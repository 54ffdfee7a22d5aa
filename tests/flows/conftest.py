"""One Prefect API for all tests of flows: starting it takes seconds."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from trinity_core.base.files import cache_folder

SERVE = """
import fcntl, sys
from pathlib import Path
from flows.local.server import TemporaryServer

root = Path(sys.argv[1])
server = TemporaryServer(root)
server.wait()
(root / "starting").write_text(server.api_url)
(root / "starting").rename(root / "api_url")
with (root / "users").open() as users:
    fcntl.flock(users, fcntl.LOCK_EX)
    (root / "api_url").unlink()
server.stop()
"""
"""Serves the API until nobody holds the lock on `users` any more, however its users have ended."""


def shared_api(root: Path) -> str:
    """The address of the API in `root`, which is started if it is not there. The caller holds the lock on `users`."""
    address = root / "api_url"
    with (root / "start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            server = subprocess.Popen([sys.executable, "-c", SERVE, str(root)], start_new_session=True)
            deadline = time.monotonic() + 200
            while not address.exists():
                assert server.poll() is None and time.monotonic() < deadline, "Prefect's API does not come up"
                time.sleep(0.05)
    return address.read_text()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all processes that share the tests."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def own_cache(shared_folder: Path) -> Iterator[None]:
    """What commands keep for later ones is kept for these tests alone; vLLM's own cache may be the user's."""
    compiled = os.environ.get("VLLM_CACHE_ROOT") or str(cache_folder().with_name("vllm"))
    own = {"XDG_CACHE_HOME": str(shared_folder / "cache"), "VLLM_CACHE_ROOT": compiled}
    with mock.patch.dict(os.environ, own):
        yield


@pytest.fixture(scope="session")
def prefect_api(shared_folder: Path) -> Iterator[str]:
    """Its address. Processes that share the tests share the API too."""
    from prefect.context import refresh_global_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import APILogWorker

    from flows.local.server import client_environment, prefect_environment

    root = shared_folder / "prefect"
    root.mkdir(exist_ok=True)
    with (root / "users").open("w") as users, mock.patch.dict(os.environ, prefect_environment(root)):
        fcntl.flock(users, fcntl.LOCK_SH)
        os.environ.update(client_environment(shared_api(root), root))
        refresh_global_settings_context()  # other tests' modules may have imported Prefect, which read its settings
        setup_logging()  # else the first flow does, during a test, and removes the handlers by which that one listens
        yield os.environ["PREFECT_API_URL"]
        APILogWorker.drain_all(timeout=10)  # what is left of them would look for the server until it gives up
        EventsWorker.drain_all(timeout=10)
    refresh_global_settings_context()
