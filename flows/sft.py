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
from tasks.checkpoints import publish
from tasks.resolve import resolve
from tasks.retries import RETRIES, RETRY_DELAY, retry_only_transient_faults
from tasks.session import cluster, together
from tasks.train import train
from tasks.verdicts import judged_by_person


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
        given = with_main_settings(overrides, stage, algorithm_type=algorithm_type, lr=lr, total_steps=total_steps)
        plan = judged_by_person(resolve(config, given, stage, model_path, "sft"))
        with cluster(plan) as session:
            results = together(session, train)
            return publish(session, results)
