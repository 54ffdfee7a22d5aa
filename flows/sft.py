"""Supervised learning from a data set (SFT, DPO), also from a person's verdicts: the trainer alone."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.parameters import (
    NO_OVERRIDES,
    AlgorithmType,
    ConfigFile,
    LearningRate,
    ModelPath,
    Overrides,
    StageName,
    TotalSteps,
    with_main_settings,
)
from tasks.adapter import PREFECT
from tasks.retries import RETRIES, RETRY_DELAY, retry_only_transient_faults
from trinity_core.runtime.configuration import load_checked
from trinity_core.runtime.driver import run_request
from trinity_core.runtime.stage import Request


@flow(name="sft", retries=RETRIES, retry_delay_seconds=RETRY_DELAY, persist_result=False)
def sft(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    stage: StageName = "",
    model_path: ModelPath = "",
    algorithm_type: AlgorithmType = None,
    lr: LearningRate = None,
    total_steps: TotalSteps = None,
) -> dict[str, Any]:
    """Train on the configuration's data set and publish the model."""
    with retry_only_transient_faults():
        settings = with_main_settings(overrides, stage, algorithm_type=algorithm_type, lr=lr, total_steps=total_steps)
        return run_request(Request(load_checked(config, settings), "sft", stage, model_path), PREFECT)
