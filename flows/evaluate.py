"""Score a model, or the checkpoints of a run, on the configuration's eval sets."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import run_stage, run_title
from flows.parameters import (
    NO_OVERRIDES,
    ConfigFile,
    ModelPath,
    Overrides,
    RunName,
    StageName,
    Which,
)
from tasks.retries import RETRIED


@flow(name="evaluate", flow_run_name=run_title, persist_result=False, **RETRIED)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    stage: StageName = "",
    model_path: ModelPath = "",
    which: Which = "latest",
    run: RunName = "",
) -> dict[str, Any]:
    """Score everything without a score; engines start only if needed."""
    return run_stage("evaluate", config, overrides, stage, model_path, which, run)
