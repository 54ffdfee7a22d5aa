"""A configuration with stages: each stage is a subflow that starts from the previous stage's model."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import ended, load, log_results, run_title
from flows.parameters import NO_OVERRIDES, ConfigFile, Overrides, RunTitle
from tasks.prefect_api import with_main_settings
from tasks.retries import retry_only_transient_faults
from trinity_core.run.driver import run_pipeline


@flow(name="pipeline", flow_run_name=run_title, persist_result=False)
def pipeline(config: ConfigFile, overrides: Overrides = NO_OVERRIDES, name: RunTitle = "") -> Any:
    """Score the base model, run the stages in order, score and publish the last model.

    Stages that an earlier attempt finished are skipped.
    """
    with retry_only_transient_faults():
        loaded = load(config, with_main_settings(overrides, "", name=name), opened=True)
        summary = run_pipeline(loaded.config, loaded.frontend, loaded.is_ready)
    log_results(loaded.config, summary)
    return ended(summary)
