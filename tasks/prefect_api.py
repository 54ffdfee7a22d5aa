"""Clients of Prefect's API outside of a flow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


@contextmanager
def api_client(api_url: str, key: str = "") -> Iterator[SyncPrefectClient]:
    """Return a client for the server at this address, ignoring servers and proxies in the environment.

    `key` is the server's key; by default that of Prefect's settings.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    here = temporary_settings({PREFECT_API_URL: api_url} | ({PREFECT_API_AUTH_STRING: key} if key else {}))
    with here, get_client(httpx_settings={"trust_env": False}, sync_client=True) as client:
        yield client
