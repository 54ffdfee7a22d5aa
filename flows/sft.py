"""Supervised learning from a data set (SFT, DPO) or from a person's verdicts: only the trainer runs."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import run_stage, run_title
from flows.parameters import (
    NO_OVERRIDES,
    AlgorithmType,
    ConfigFile,
    LearningRate,
    ModelPath,
    Overrides,
    RunTitle,
    StageName,
    TotalSteps,
)
from tasks.prefect_api import with_main_settings
from tasks.retries import RETRIED


@flow(name="sft", flow_run_name=run_title, persist_result=False, **RETRIED)
def sft(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    name: RunTitle = "",
    stage: StageName = "",
    model_path: ModelPath = "",
    algorithm_type: AlgorithmType = None,
    lr: LearningRate = None,
    total_steps: TotalSteps = None,
) -> dict[str, Any]:
    """Train on the configuration's data set and publish the model."""
    main = {"name": name, "algorithm_type": algorithm_type, "lr": lr, "total_steps": total_steps}
    settings = with_main_settings(overrides, stage, **main)
    return run_stage("sft", config, settings, stage, model_path)
