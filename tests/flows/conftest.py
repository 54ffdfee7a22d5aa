"""One Prefect API for all tests of flows: starting it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from prefect.context import refresh_global_settings_context

    from tasks.server import TemporaryServer, environment

    root = tmp_path_factory.mktemp("prefect")
    before = dict(os.environ)
    os.environ.update(environment(root))
    server = TemporaryServer(root)
    os.environ["PREFECT_API_URL"] = server.api_url
    server.wait()
    refresh_global_settings_context()  # other tests' modules may have imported Prefect, which then read its settings
    yield server.api_url
    server.stop()
    os.environ.clear()
    os.environ.update(before)
    refresh_global_settings_context()
