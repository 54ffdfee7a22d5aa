"""One Prefect API for all tests of flows: starting it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from prefect.context import refresh_global_settings_context
    from prefect.events.worker import EventsWorker
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import APILogWorker

    from flows.local.server import TemporaryServer, prefect_environment

    root = tmp_path_factory.mktemp("prefect")
    server = TemporaryServer(root)
    with mock.patch.dict(os.environ, prefect_environment(root) | {"PREFECT_API_URL": server.api_url}):
        server.wait()
        refresh_global_settings_context()  # other tests' modules may have imported Prefect, which read its settings
        setup_logging()  # else the first flow does, amid a test, and removes the handlers by which that one listens
        yield server.api_url
        APILogWorker.drain_all(timeout=10)  # what is left of them would look for the server until it gives up
        EventsWorker.drain_all(timeout=10)
        server.stop()
    refresh_global_settings_context()
