"""Scores: a model, or the checkpoints of a run, on the configuration's eval sets."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import (
    NO_OVERRIDES,
    ConfigFile,
    ModelPath,
    Overrides,
    RunName,
    StageName,
    Which,
)
from tasks.adapter import PREFECT
from tasks.retries import RETRIES, RETRY_DELAY, retry_only_transient_faults
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.driver import run_request
from trinity_core.runtime.stage import Request


@flow(name="evaluate", retries=RETRIES, retry_delay_seconds=RETRY_DELAY, persist_result=False)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    stage: StageName = "",
    model_path: ModelPath = "",
    which: Which = "latest",
    run: RunName = "",
) -> dict[str, Any]:
    """Score what has no score yet; engines start only if anything is to be scored."""
    with retry_only_transient_faults():
        return run_request(Request(load_checked(config, overrides), "evaluate", stage, model_path, which, run), PREFECT)
