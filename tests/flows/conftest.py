"""One Prefect API for all tests of flows: starting it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from tasks.server import TemporaryServer, environment

    root = tmp_path_factory.mktemp("prefect")
    before = dict(os.environ)
    os.environ.update(environment(root))
    server = TemporaryServer(root)
    os.environ["PREFECT_API_URL"] = server.api_url
    server.wait()
    yield server.api_url
    server.stop()
    os.environ.clear()
    os.environ.update(before)
