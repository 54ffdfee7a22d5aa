"""How flows and Studio reach a flow: clients of Prefect's API outside of one, and the main settings of its form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
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


NOT_PROMOTED = "Completed, not promoted"
"""Name of the state of a flow whose gate has not promoted the candidate."""
REFUSED = " refused: "
"""Between the name and the reason in the name of a flow run whose configuration was refused."""
WITH_FINDINGS = "Completed, with findings"
"""Name of the state of a flow whose run has ended, but in which `trinity doctor` finds something."""
MAIN_SETTINGS = {
    "name": "name",
    "algorithm_type": "algorithm.algorithm_type",
    "lr": "algorithm.optimizer.lr",
    "total_steps": "buffer.total_steps",
    "batch_size": "buffer.batch_size",
    "repeat_times": "algorithm.repeat_times",
}
"""Parameter → key. Empty parameters keep the file's value."""


def with_main_settings(overrides: Sequence[str], stage: str, **main_settings: float | str | None) -> list[str]:
    """Return the overrides plus one for each given main setting: of the run for `name`, else of the stage if one is
    named."""
    settings = {name: value for name, value in main_settings.items() if value not in (None, "")}
    added = {MAIN_SETTINGS[name]: json.dumps(value, ensure_ascii=False) for name, value in settings.items()}
    prefixes = {key: f"stages.{stage}." if stage and key != "name" else "" for key in added}
    return [*overrides, *(f"{prefixes[key]}{key}={value}" for key, value in added.items())]
