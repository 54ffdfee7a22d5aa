"""Explorers and a trainer as separate runs within one flow run."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import run_title
from flows.parameters import NO_OVERRIDES, ConfigFiles, Overrides
from tasks.frontend import PREFECT
from tasks.retries import retry_only_transient_faults
from trinity_core.run.parts import run_parts


@flow(name="rft", flow_run_name=run_title, persist_result=False)
def rft_async(configs: ConfigFiles, overrides: Overrides = NO_OVERRIDES) -> dict[str, Any]:
    """Run a trainer and its explorers, each from its own configuration and as a subflow; they share one Ray.

    Each is retried on its own after a transient fault. When one fails for good, the others save and end.
    """
    with retry_only_transient_faults():
        return run_parts(configs, overrides, PREFECT)
