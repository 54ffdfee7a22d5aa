"""Create a task set from others, before any run."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import load, run_title
from flows.parameters import NO_OVERRIDES, ConfigFile, Overrides, StageName
from tasks.frontend import PREFECT
from tasks.retries import RETRIED, retry_only_transient_faults
from trinity_core.run import driver


@flow(name="curate", flow_run_name=run_title, persist_result=False, **RETRIED)
def curate(config: ConfigFile, overrides: Overrides = NO_OVERRIDES, stage: StageName = "") -> dict[str, Any]:
    """Run the configuration's task pipeline, unless its output exists; a killed pipeline resumes."""
    with retry_only_transient_faults():
        return driver.curate(load(config, overrides).config, stage, PREFECT)
