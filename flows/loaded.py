"""Flows of configurations that this process has loaded and checked: what the commands of `trinity` start."""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow

from flows.parameters import NO_OVERRIDES
from tasks.adapter import PREFECT
from tasks.retries import RETRIES, RETRY_DELAY, retry_only_transient_faults
from trinity_core.config import Config
from trinity_core.runtime import driver
from trinity_core.runtime.stage import Request


def loaded_flow(name: str, loaded: Config, is_ready: bool) -> Flow[..., dict[str, Any]]:
    """The flow `name` for this configuration; its parameters say where that came from, and which part is meant.

    `is_ready`: preflight has passed just now.
    """

    retries = 0 if name == "pipeline" else RETRIES  # each of its stages has retries

    @flow(name=name, retries=retries, retry_delay_seconds=RETRY_DELAY, persist_result=False)
    def run_loaded(
        config: str, overrides: list[str] = NO_OVERRIDES, stage: str = "", which: str = "", run: str = ""
    ) -> dict[str, Any]:
        with retry_only_transient_faults():
            if name == "pipeline":
                return driver.run_pipeline(loaded, PREFECT, is_ready)
            if name == "curate":
                return driver.curate(loaded, stage, PREFECT)
            return driver.run_request(Request(loaded, name, stage, "", which, run, is_ready), PREFECT)

    return run_loaded
