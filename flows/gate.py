"""Compare a candidate with the project's champion, and promote it if it is better."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow

from flows.loaded import run_stage, run_title
from flows.parameters import NO_OVERRIDES, ConfigFile, Overrides, StageName, shown
from tasks.retries import RETRIED

Candidate = Annotated[
    str, shown("Model", "Checkpoint or model folder to judge; empty: the latest checkpoint of the configuration's run")
]


@flow(name="gate", flow_run_name=run_title, persist_result=False, **RETRIED)
def gate(
    config: ConfigFile, overrides: Overrides = NO_OVERRIDES, stage: StageName = "", model_path: Candidate = ""
) -> dict[str, Any]:
    """Let candidate and champion answer held-out tasks until the evidence suffices; without a model, the candidate is
    the run's latest checkpoint."""
    return run_stage("gate", config, overrides, stage, model_path)
