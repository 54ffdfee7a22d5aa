"""Reinforcement fine-tuning: explorer and trainer run concurrently."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.loaded import run_stage, run_title
from flows.parameters import (
    NO_OVERRIDES,
    AlgorithmType,
    BatchSize,
    ConfigFile,
    LearningRate,
    ModelPath,
    Overrides,
    RepeatTimes,
    RunTitle,
    StageName,
    TotalSteps,
)
from tasks.prefect_api import with_main_settings
from tasks.retries import RETRIED


@flow(name="rft", flow_run_name=run_title, persist_result=False, **RETRIED)
def rft(
    config: ConfigFile,
    overrides: Overrides = NO_OVERRIDES,
    name: RunTitle = "",
    stage: StageName = "",
    model_path: ModelPath = "",
    algorithm_type: AlgorithmType = None,
    lr: LearningRate = None,
    total_steps: TotalSteps = None,
    batch_size: BatchSize = None,
    repeat_times: RepeatTimes = None,
) -> dict[str, Any]:
    """Explore and train (or one of them, by the configuration's mode), evaluate the result and publish it."""
    settings = with_main_settings(
        overrides,
        stage,
        name=name,
        algorithm_type=algorithm_type,
        lr=lr,
        total_steps=total_steps,
        batch_size=batch_size,
        repeat_times=repeat_times,
    )
    return run_stage("rft", config, settings, stage, model_path)
